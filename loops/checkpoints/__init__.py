"""Checkpoints: written completely or not at all, checked when read, loaded under any wrapper.

Imports ``loops.state``, ``loops.rng``, ``loops.schedule``, collectives, registry and wrappers.
Start reading in checkpoint.py.
"""
