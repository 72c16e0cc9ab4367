"""From a checked config to the parts of a run. Start with parts.py."""
