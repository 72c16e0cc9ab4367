"""Loggers: hooks that write records, settings and media to files, TensorBoard and services.

May import the hooks of ``loops`` and everything below them. Start with ``logger.py``.
"""
