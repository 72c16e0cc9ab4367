"""Run Python programs as a user would: examples, programs of pages, commands."""

import subprocess
import sys
from pathlib import Path
from typing import Any


def ended(*words: Any, timeout: float = 400.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` and return the finished process; `options` are passed to subprocess."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


def run(*words: Any, timeout: float = 400.0, **options: Any) -> str:
    """Return the output of `python WORDS`, which must succeed within `timeout` seconds."""
    done = ended(*words, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(code: str, folder: Path) -> str:
    """Run a program as a file in a folder and return its output."""
    (folder / "script.py").write_text(code)
    return run("script.py", cwd=folder)
