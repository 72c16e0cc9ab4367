"""Tools for the time before a long run: a summary of the model, and searches for good settings.

May import everything in ``runner`` except the commands. Start with ``sweep.py``.
"""
