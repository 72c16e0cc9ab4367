"""Which model goes to which device. Start with assigner.py."""
