"""Which rank this process is, on which device it talks to the others, and how groups start and end.
Imports nothing of the other rooms. Start with ranks.py.
"""
