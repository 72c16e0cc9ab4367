"""Runnable configs and the small models and data that they name."""

__all__: list[str] = []
