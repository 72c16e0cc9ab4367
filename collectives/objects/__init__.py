"""Python objects across ranks, through the network or files, and one error on every rank. Imports
the rooms named above it in setup.cfg. Start with objects.py.
"""
