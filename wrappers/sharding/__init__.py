"""Sharded and split tensors: layouts, meshes of ranks, tensor parallelism, models built without
memory. Imports nothing of the other rooms. Start with layout.py.
"""
