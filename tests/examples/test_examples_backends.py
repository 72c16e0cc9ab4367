"""The example of metrics over back-ends runs as its first lines say."""

import runpy
from pathlib import Path

import pytest
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "metric_backends.py"


@pytest.mark.slow
def test_metric_backends(tmp_path: Path) -> None:
    out = run(str(EXAMPLE), cwd=tmp_path)
    # The same number over each back-end, and as one process has it.
    alone = runpy.run_path(str(EXAMPLE))["accuracy_of_nearest_mean"]("non_dist")
    assert 0.8 < alone < 1.0
    assert out.splitlines() == [
        f"torch: {alone:.4f} on 2 ranks",
        f"torch_cpu: {alone:.4f} on 2 ranks",
        f"counting: {alone:.4f} on 2 ranks, 4 states carried",
    ]


def test_it_stays_short() -> None:
    assert sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines()) <= 45
