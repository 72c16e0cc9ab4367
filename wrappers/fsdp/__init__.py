"""Parameters sharded over the ranks. Undocumented state of torch is read in torch_internals.py
only. Imports steps, sharding, batchnorm and blocks. Start with fully_sharded.py.
"""
