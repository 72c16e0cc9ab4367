"""A config with a custom metric next to torchmetrics."""

from pathlib import Path

import pytest
from marks import slow
from ranks import run_ranks
from runner_parts import records, run_command

METRIC = """
from stepwrap.collectives import BaseMetric


class Correct(BaseMetric):
    def add(self, preds, target):
        self._results += (preds.argmax(1) == target).tolist()

    def compute_metric(self, results):
        return sum(results) / len(results)
"""
WORDS = (
    "hooks.progress=false",
    "hooks.checkpoint={keep_best: correct, mode: max}",
    "train.max_epochs=2",
)


@pytest.mark.parametrize("nproc", [2, *slow(1)])
def test_a_base_metric_is_listed_and_watched(run: Path, nproc: int) -> None:
    (run / "correct.py").write_text(METRIC)
    metric = "metrics.correct={type: correct.Correct, dist_backend: torch_cpu}"
    words = ("train", "points.yaml", "--run-dir", "run", metric, *WORDS)
    assert run_ranks(run_command, nproc, run, *words) == [0] * nproc
    evaluations = [record for record in records(run / "run") if "correct" in record]
    assert len(evaluations) == 3
    for record in evaluations:
        assert record["correct"] == pytest.approx(record["accuracy"], abs=1e-6)
