"""Pools of processes and of threads, and the results of their calls.

Imports ``transport`` and the other modules of ``parallel``. Start with base_pool.py (the calls),
then dispatcher.py (the pool's thread); worker.py runs in the workers.
"""
