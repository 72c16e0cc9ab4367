"""Tensors, dicts of tensors and scalars across ranks, in every dtype.

Imports the subpackages objects, process and trace. Start with tensors.py.
"""
