"""Batch normalisation with the statistics of the whole batch, over copies and over ranks. Imports
replicas. Start with sync_batchnorm.py.
"""
