"""Configs of mmengine as configs of ours. Start with convert.py."""
