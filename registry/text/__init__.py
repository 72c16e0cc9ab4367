"""Read and merge YAML and Python configs with the origin of each value.

Imports ``errors`` and ``imports``. Start with config.py.
"""
