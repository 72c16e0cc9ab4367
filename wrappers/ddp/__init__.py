"""One replica per process, whose gradients are averaged all at once or child by child. Imports
steps and batchnorm. Start with distributed.py.
"""
