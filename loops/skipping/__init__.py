"""Training steps that make no update: by their numbers, or because a guard finds an outlier.

Imports ``loops.checkpoints``, ``loops.hook``, ``loops.undo``, ``loops.schedule``, ``loops.state``
and wrappers. Start reading in skip_steps.py.
"""
