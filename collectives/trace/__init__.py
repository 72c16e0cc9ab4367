"""What surrounds every communication: the first message, a record, and an error that says who waits
where. Imports process. Start with calling.py.
"""
