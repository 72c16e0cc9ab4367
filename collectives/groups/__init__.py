"""Groups of ranks with messages and collectives as methods.

Imports objects, process, tensors and trace. Start with group.py.
"""
