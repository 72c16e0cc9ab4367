"""Checkpoints: written whole or not at all, checked when read, loaded under any wrapper. Imports
state and collectives. Start with checkpoint.py.
"""
