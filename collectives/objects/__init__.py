"""Python objects across ranks, through the network, shared memory or files; errors on every rank.

Imports the subpackages process and trace. Start with objects.py.
"""
