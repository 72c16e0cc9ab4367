"""Every benchmark for devices runs to its end on a pretend device; its figures do not count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.pretend, pytest.mark.nightly]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Still fewer steps than those of `--quick`: operations on pretend devices take long.
SHORTER = {
    "ledger": ["--steps", "10", "--rounds", "1"],
    "lightning_steps": ["--steps", "30", "--turns", "1"],
    "step_overhead": ["--steps", "20", "--rounds", "1"],
    "sync_batchnorm": ["--rounds", "1", "--batch", "4"],
    "wrappers": ["--rounds", "1"],
}


def find_benchmarks() -> list[Any]:
    """Return the benchmarks with `--device`, as benchmarks/run.py finds them."""
    files = BENCHMARKS.glob("*.py")
    names = {file.stem for file in files if '"--device"' in file.read_text(encoding="utf-8")}
    marks = {"compiled": pytest.mark.triton}
    return [pytest.param(name, marks=marks.get(name, ())) for name in sorted(names - {"run"})]


@pytest.mark.parametrize("name", find_benchmarks())
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--device", "cuda", "--quick"]
    figures = tmp_path / "figures"
    done = subprocess.run(
        [*command, *SHORTER.get(name, []), "--json", str(figures)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    values = [json.loads(line)["median"] for line in figures.read_text().splitlines()]
    assert values
    assert all(value > 0 for value in values)
