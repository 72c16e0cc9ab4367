"""Configs of mmengine as configs of ours.

Start with mapping.py: the table of what each setting becomes; schedules.py has the part of the
learning rate. draft.py walks along its rows, source.py reads the file and finds the line of each
setting, convert.py puts the config together. Imports of ours: the registry alone.
"""
