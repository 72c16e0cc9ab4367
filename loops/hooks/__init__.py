"""The hooks that can be added to a run, one file for each concern.

May import everything in ``loops`` except the loops, loggers and predictions. Start reading in
early_stop.py, which is short.
"""
