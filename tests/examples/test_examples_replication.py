"""The example of a replication callback runs, and its copies share what they should."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "replication_callback.py"


@pytest.mark.slow
def test_it_prints_its_result(tmp_path: Path) -> None:
    out = run(str(EXAMPLE), cwd=tmp_path)
    line = r"accuracy (0\.\d+); (\S+) from the mean of one copy\n"
    accuracy, difference = re.fullmatch(line, out).groups()
    assert float(accuracy) > 0.9
    assert float(difference) < 1e-6
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_statistic_is_of_the_whole_batch() -> None:
    example = runpy.run_path(str(EXAMPLE))
    three, _ = example["train"](["cpu"] * 3, steps=5)
    one, _ = example["train"](["cpu"], steps=5)
    assert three.abs().max() > 0.1
    assert torch.allclose(three, one, atol=1e-6, rtol=0)
