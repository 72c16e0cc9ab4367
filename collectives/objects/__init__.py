"""Python objects across ranks, through the network, shared memory or files; errors on every rank.

Imports trace and process. Start with objects.py.
"""
