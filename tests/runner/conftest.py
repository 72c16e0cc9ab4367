"""The fixtures of tests that run commands."""

from remote_store import bucket, proxy, s3, s3_port  # noqa: F401
from run_fixtures import own_folder, run, start  # noqa: F401
