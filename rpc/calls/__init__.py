"""Calls between processes, references to remote values, and groups that share values by key.

Imports none of the other rooms. Start with group.py.
"""
