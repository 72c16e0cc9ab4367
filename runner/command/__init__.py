"""The command line and its output.

Commands are found through the entry-point group ``stepwrap.commands``. Start with cli.py.
command.py declares the arguments of a command. Its body, which may import torch, is imported when
called.
"""
