"""How a loss becomes new weights: optimizer wrappers, clipping, mixed precision, parameter groups.
Knows no kind of parallelism. Start with optim.py.
"""
