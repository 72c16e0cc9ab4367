"""One replica per process, gradients averaged: all at once, or child by child. Imports steps,
sharding and batchnorm. Start with distributed.py.
"""
