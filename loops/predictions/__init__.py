"""Predictions in files: the hook that writes them, rows of outputs, and formats. Imports data,
notes and the state of `loops`. Start in hook.py; files.py imports pyarrow where it is used.
"""
