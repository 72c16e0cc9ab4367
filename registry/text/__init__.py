"""YAML and Python files, merged, with the origin of each value. Start with config.py."""
