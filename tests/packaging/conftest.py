"""Fixtures for tests of pages."""

from browser import browser  # noqa: F401
