"""Rank, world size and devices of this process; start and end of process groups.

Imports no other subpackage. Start with ranks.py.
"""
