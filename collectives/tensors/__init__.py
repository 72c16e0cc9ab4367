"""Tensors, dicts of tensors and scalars across ranks, in every dtype. Start with tensors.py."""
