"""The step contract: models that compute their losses, the transfer of batches to the device, the
training, validation and test steps of all wrappers, and their checks. Imports sharding. Start with
step.py.
"""
