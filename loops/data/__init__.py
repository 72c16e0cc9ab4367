"""Training data from loaders and data sets that tell where they are. Imports loaders and state.
Start with passes.py.
"""
