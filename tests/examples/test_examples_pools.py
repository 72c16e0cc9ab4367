"""The example of a pool whose workers hold models."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_pool.py"


def test_features_from_workers_are_learnt_from() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"accuracy (0\.\d+|1\.0+)\n", done.stdout)
    assert found
    assert float(found[1]) > 0.93
