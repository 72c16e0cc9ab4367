"""Pools of processes and of threads, and the results of their calls.

Start with base_pool.py (the calls), then dispatcher.py (the pool's thread); worker.py runs in the
workers. A call is a job; it has one task for each chunk of its items. This package imports
``transport`` and, from ``parallel``, only ``errors`` and ``processes``.
"""
