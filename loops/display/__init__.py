"""Texts of log records, and the panel with the progress of a run, on a terminal or in a notebook.

Imports only ``collectives`` and the state of the loops. Start reading in lines.py; panel.py has the
content of the panel, which terminal.py and notebook.py show. limits.py computes what limits the
speed.
"""
