"""The command line and what it prints. Start with cli.py."""
