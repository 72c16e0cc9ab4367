"""The order of the data, its shards, and the batches of evaluations. Imports nothing of the other
rooms; start with loaders.py.
"""
