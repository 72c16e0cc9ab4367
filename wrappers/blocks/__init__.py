"""Which modules of a model are its blocks, and what is done to each: activation checkpointing and
compiling. Imports batchnorm. Start with blocks.py.
"""
