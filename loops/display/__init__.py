"""Texts of log records, and the panel with the progress of a run, on a terminal or in a notebook.

Imports only the state of the loops. Start reading in lines.py; panel.py has the content of the
panel, and terminal.py and notebook.py show it.
"""
