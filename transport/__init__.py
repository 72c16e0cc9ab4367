"""Values between processes: pickling, tensors and large buffers, shared memory, remote errors.

Used by collectives, parallel and rpc; imports nothing of ours, and torch only where a tensor is at
hand. Start with wire.py (a value as one message), then pickling.py. Pickles must come
from the user's own processes: the folders above see to that.
"""
