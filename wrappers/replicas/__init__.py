"""Copies of a module in one process: a ``DataParallel`` that creates and runs them, and the session
through which they exchange messages during a forward. Imports steps. Start with session.py.
"""
