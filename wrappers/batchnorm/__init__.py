"""Batch normalisation by the statistics of the whole batch, over copies and over ranks. Imports
replicas and steps. Start with sync_batchnorm.py.
"""
