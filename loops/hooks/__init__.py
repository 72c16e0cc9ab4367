"""What can be added to a run, from a file for each concern. Imports all of loops but the loops
themselves; a short one to start with is early_stop.py.
"""
