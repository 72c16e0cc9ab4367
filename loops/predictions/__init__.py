"""Predictions in files: the hook that writes them, rows of outputs, and formats.

Imports ``loops.data``, ``loops.error_notes``, ``loops.hook``, ``loops.state`` and registry. Start
reading in hook.py; files.py imports pyarrow lazily.
"""
