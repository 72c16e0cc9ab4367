"""Training data: its order, how updates are cut out of it on any number of ranks, loaders that go
on from a place, batches in memory and on the way to a device. Imports checkpoints, schedules,
notes, the state and the random streams of `loops`. Start reading in sampler.py, then loaders.py;
places.py is for loaders of others.
"""
