"""How a loss becomes new weights: optimizer wrappers, clipping, mixed precision, parameter groups.
Imports sharding and steps. Start with optim.py.
"""
