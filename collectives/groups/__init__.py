"""Some of the ranks as one object, and the group of one host. Start with group.py."""
