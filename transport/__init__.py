"""Values between processes: pickling, tensors and large buffers, shared memory, remote errors.

Used by collectives, parallel and rpc. Imports none of our folders, and torch only when a value
contains tensors. Start with wire.py (a value as one message), then pickling.py. Unpickling runs
code, so callers must only pass data from the user's own processes.
"""
