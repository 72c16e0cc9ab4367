"""Checks every name, key and value of a run config before anything is built.

All problems are reported at once. Start with check_config.py.
"""
