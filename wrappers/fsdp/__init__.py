"""Parameters spread over the ranks. Start with fully_sharded.py."""
