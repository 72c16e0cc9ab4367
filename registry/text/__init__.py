"""Reads and merges YAML and Python configs with the origin of each value. Start with config.py."""
