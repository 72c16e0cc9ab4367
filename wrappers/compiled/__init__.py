"""A training step as one compiled program: traced, compiled ahead of time, kept on disk, and run in
place of the usual step where all that it was traced for still holds. Imports steps and optimizers.
Start with step.py.
"""
