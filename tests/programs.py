"""Runs Python programs as a user would: the examples, those of the pages, the commands."""

import subprocess
import sys
from pathlib import Path


def run(*words: str, cwd: Path, timeout: float = 200.0) -> str:
    """Return what `python WORDS` prints in a folder; it has to succeed within `timeout` seconds."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(code: str, folder: Path) -> str:
    """Return what a program prints that is run as a file of a folder."""
    (folder / "script.py").write_text(code)
    return run("script.py", cwd=folder)
