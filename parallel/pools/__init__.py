"""Pools of processes and of threads, and the results of their calls. Imports the
files beside this room. Start with base_pool.py (the calls), then dispatcher.py, the parent's side
of a pool; worker.py is what runs in a worker.
"""
