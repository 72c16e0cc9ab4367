"""Values between processes: pickling, tensors in shared memory, queues. Start with queues.py."""
