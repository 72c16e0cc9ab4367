"""Searches for good settings, each of which trains several times.

Imports everything in the runner except its commands. Start with sweep.py.
"""
