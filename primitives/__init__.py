"""Mechanisms that several folders need, each with one home below all of them.

Imports none of our folders. Only tensor_bits.py imports torch, because the registry and the
launcher must start without it. Each file answers one question, so there is no first one to read.
"""
