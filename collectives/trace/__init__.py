"""What surrounds every communication: a record of it, and an error that says who waits where.
Imports transport and process. Start with calling.py.
"""
