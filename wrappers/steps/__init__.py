"""Models that compute their losses, preprocessing of batches, the training, validation and test
steps of all wrappers, buffers that are saved around them, and the checks of these steps. Imports no
other room. Start with step.py.
"""
