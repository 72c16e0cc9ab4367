"""A training step as one compiled program.

The forward is captured (capture.py), traced with backward and update (trace.py), compiled ahead of
time and kept on disk (program.py). A program runs instead of the usual step while its contract
holds (contract.py), and is verified against eager steps (verifier.py, reference.py). Imports steps,
sharding, batchnorm, ddp and optimizers. Start with step.py.
"""
