"""Runs the programs of the pages as a reader would."""

import subprocess
import sys
from pathlib import Path


def run_script(code: str, folder: Path) -> str:
    """Return what a program prints that is run in a folder."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
