"""The fixtures of tests that run commands."""

from run_fixtures import own_folder, run, start  # noqa: F401
