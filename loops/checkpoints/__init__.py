"""Checkpoints: written completely or not at all, checked when read, loaded under any wrapper.

Imports the state of ``loops``, collectives and wrappers. Start reading in checkpoint.py.
"""
