"""The wrapper that shards parameters over the ranks. Only torch_internals.py uses undocumented
state of torch. Imports steps, sharding, batchnorm and blocks. Start with fully_sharded.py.
"""
