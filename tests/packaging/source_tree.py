"""The source files of the library, for tests that measure them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# Found as by setup.py and the Makefile.
FOLDERS = sorted(file.parent.name for file in ROOT.glob("*/py.typed"))
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
