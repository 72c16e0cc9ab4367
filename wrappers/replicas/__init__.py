"""Copies of a module in one process: where they meet during a forward, and the DataParallel that
runs them. Imports steps. Start with session.py.
"""
