"""Backends for object collectives (torch, MPI, custom) and metrics that run on any of them.

Imports the subpackages objects, process and trace. Start with base.py.
"""
