"""Parameters spread over the ranks. What torch does not document is read in torch_internals.py
alone. Start with fully_sharded.py.
"""
