"""Object collectives over whatever carries them: torch, MPI, one's own; and metrics over any of
them. Start with base.py.
"""
