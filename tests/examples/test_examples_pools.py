"""The example of a pool whose workers hold models."""

import re
from pathlib import Path

import pytest
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_pool.py"


@pytest.mark.slow
def test_features_from_workers_are_learnt_from(tmp_path: Path) -> None:
    found = re.fullmatch(r"accuracy (0\.\d+|1\.0+)\n", run(str(EXAMPLE), cwd=tmp_path))
    assert found
    assert float(found[1]) > 0.93
