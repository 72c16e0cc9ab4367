"""Backends for object collectives (torch, MPI, custom) and metrics that run on any of them.

Imports objects and trace. Start with base.py.
"""
