"""The command line and its output.

Commands are found through the entry-point group ``stepwrap.commands``. Start with cli.py. The
commands in entries.py are declared with the class in command.py. Their functions, which may import
torch and everything in ``runner``, are imported when a command is called.
"""
