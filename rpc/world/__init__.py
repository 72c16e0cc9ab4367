"""Who belongs to a world, the store in which its members meet, its beginning and its end. Imports
calls. Start with world.py.
"""
