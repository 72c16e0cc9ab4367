"""Sharded and split tensors: layouts, meshes of ranks, tensor parallelism, and construction of
models without memory. Imports no other sub-package. Start with layout.py.
"""
