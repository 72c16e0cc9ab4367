"""Mechanisms that several folders need, each with one home below all of them.

Imports none of our folders. Only tensor_bits.py imports torch, because the registry and the
launcher must start without it. Read the file of the mechanism that you need.
"""
