"""Batch normalisation with the statistics of the whole batch, which is split over copies or ranks.
Imports replicas. Start with sync_batchnorm.py.
"""
