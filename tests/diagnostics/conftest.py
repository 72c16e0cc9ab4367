"""The fixtures of tests that run commands, and a browser."""

from browser import browser  # noqa: F401
from run_fixtures import own_folder, run, start  # noqa: F401
