"""Groups of ranks with messages and collectives as methods.

Imports the subpackages objects, process, tensors and trace. Start with group.py.
"""
