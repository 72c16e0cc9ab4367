"""Members of a world, the store through which they meet, and the start and end of a world.

Imports calls. Start with world.py.
"""
