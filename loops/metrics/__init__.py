"""Metrics: fed from the outputs of a step, merged over the ranks, watched by hooks. Imports data,
notes and the state of `loops`. Start in scores.py; mean_loss.py alone imports torchmetrics.
"""
