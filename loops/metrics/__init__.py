"""Metrics: updated from the outputs of a step, merged over the ranks, watched by hooks.

Imports ``loops.data``, ``loops.error_notes`` and ``loops.state``. Start reading in evaluation.py.
Only mean_loss.py imports torchmetrics.
"""
