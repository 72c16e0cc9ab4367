"""Placement of models on devices. Start with assigner.py."""
