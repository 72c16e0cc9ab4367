"""Convert configs of mmengine to configs of stepwrap.

Start with convert.py, which has the table of settings and the functions of its rows. hooks.py has
the rows of hooks, and schedules.py has the rows of schedules. draft.py applies the rows. source.py
reads the file and finds the line of each setting. Imports only ``registry``.
"""
