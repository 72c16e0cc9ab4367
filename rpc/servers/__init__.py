"""Servers of a world: an ordered key-value store, a model, and gradients that train one. Imports
world and calls. Start with ordered_server.py.
"""
