"""The step contract: models that know their losses, batches onto the device, the three steps that
every wrapper has, and what a step is refused for. Imports sharding. Start with step.py.
"""
