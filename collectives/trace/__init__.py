"""Records of collective calls, header exchange, and errors that say which rank waits where.

Imports the subpackage process. Start with calling.py.
"""
