"""Metrics: updated from the outputs of a step, merged over the ranks, watched by hooks.

Imports the data room, error notes and the state of ``loops``. Start reading in evaluation.py. Only
mean_loss.py imports torchmetrics.
"""
