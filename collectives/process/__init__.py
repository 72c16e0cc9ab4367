"""Rank, world size and devices of this process; start and end of process groups.

Imports none of the other rooms. Start with ranks.py.
"""
