"""Parameters spread over the ranks. What torch does not document is read in torch_internals.py
alone. Imports steps, sharding, batchnorm and blocks. Start with fully_sharded.py.
"""
