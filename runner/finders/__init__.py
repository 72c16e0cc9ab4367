"""Prepare long runs: summarize models, and search for good settings.

May import everything in ``runner`` except the commands. Start with ``sweep.py``.
"""
