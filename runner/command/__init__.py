"""The command line and what it prints.

Commands are found through the entry-point group `stepwrap.commands`. Start with cli.py; command.py
declares what a command takes, and the bodies, which may import torch, are imported when called.
"""
