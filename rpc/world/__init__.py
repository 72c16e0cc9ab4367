"""Members of a world, the store through which they meet, and the start and end of a world.

Imports the subpackage calls. Start with world.py.
"""
