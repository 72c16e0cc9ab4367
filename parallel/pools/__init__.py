"""Pools of processes and of threads, and the results of their calls. Imports transport and the
files beside this room. Start with base_pool.py (the calls), then pool.py; dispatcher.py is the
parent's side of a pool of processes, worker.py what runs in a worker.
"""
