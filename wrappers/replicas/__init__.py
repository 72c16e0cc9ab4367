"""Copies of a module in one process: the ``DataParallel`` that creates and runs them, and the
session in which they exchange messages during a forward. Imports steps. Start with session.py.
"""
