"""Servers of a world: an ordered key-value store, a model server and a gradient server.

Imports the subpackage calls. Start with ordered_server.py.
"""
