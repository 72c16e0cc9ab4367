"""The step contract: models that know their losses, batches onto the device, and the three steps
that every wrapper has. Imports sharding only for the text of one error. Start with step.py.
"""
