"""Calls between processes, references to remote values, and groups that share values by key.

Imports no other subpackage. Start with group.py.
"""
