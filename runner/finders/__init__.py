"""What to know or choose before a run: the summary of a model, and searches for good settings.

May import everything in ``runner`` except the commands. Start with ``sweep.py``.
"""
