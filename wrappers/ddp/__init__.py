"""Wrappers for one replica per process, which average the gradients of the whole model or of each
child separately. Imports steps and batchnorm. Start with distributed.py.
"""
