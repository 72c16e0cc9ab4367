"""Records of collective calls, header exchange, and errors that say which rank waits where.

Imports process. Start with calling.py.
"""
