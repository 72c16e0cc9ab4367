"""Calls between processes, references to what stays in another one, and groups with values by key.
Start with group.py.
"""
