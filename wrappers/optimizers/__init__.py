"""Optimizer wrappers: backward, accumulation, clipping, mixed precision, parameter groups.
Imports sharding and steps. Start with optim.py.
"""
