"""Training data: its order, its split into updates on any number of ranks, and resumable loaders.

Imports checkpoints, schedules, error notes, the state and the random streams of ``loops``. Start
reading in sampler.py, then loaders.py; resume.py handles loaders that ``build_loader`` did not
create.
"""
