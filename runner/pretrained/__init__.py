"""The weights that a new training starts from: reading files of other programs, fitting names.

Imports ``run_folder`` and the layers below the runner. Start with load.py.
"""
