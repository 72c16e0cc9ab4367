"""Objects as bytes, shared memory, and the first message of every collective. Imports process.
Start with serialize.py.
"""
