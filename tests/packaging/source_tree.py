"""The source files of the library, for tests that measure them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "collectives",
    "configs",
    "loops",
    "parallel",
    "plugins",
    "registry",
    "rpc",
    "runner",
    "transport",
    "version",
    "wrappers",
)
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
