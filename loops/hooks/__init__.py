"""The hooks that can be added to a run, one file for each concern.

Imports everything in ``loops`` except the loops themselves. Start reading in early_stop.py, which
is short.
"""
