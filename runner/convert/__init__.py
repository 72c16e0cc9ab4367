"""Configs of mmengine as configs of ours.

Start with convert.py: the table of what each setting becomes, and the functions of its rows;
hooks.py has those of hooks and schedules. draft.py walks along the rows, source.py reads the file
and finds the line of each setting. Imports of ours: the registry alone.
"""
