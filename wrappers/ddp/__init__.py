"""One replica per process, gradients averaged: all at once, or child by child. Start with
distributed.py.
"""
