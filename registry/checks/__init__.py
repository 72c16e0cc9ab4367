"""Check every name, key and value of a run config before anything is built.

All problems are reported at once. Imports ``text``, ``tree`` and the modules below them. Start with
check_config.py.
"""
