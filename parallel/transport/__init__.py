"""Values between processes: pickling, tensors in shared memory, exceptions, queues. Imports only
`parallel/errors.py`. Start with queues.py.
"""
