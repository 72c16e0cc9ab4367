"""Runs over NCCL that resume with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_runs import plain, train
from gpu_ranks import run_on_gpus
from weights import apart

pytestmark = pytest.mark.gpu2


def _train(kind: str, folder: Path, stop: int | None, batch_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"samples": 36, "batch_size": batch_size, "accumulate": 1}
    return train(kind, folder, stop, device="cuda", **options)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_one_and_two_ranks_within_a_run(kind: str, tmp_path: Path) -> None:
    """12 samples per update, six updates; each stage resumes the run of the one before."""
    weights = []
    for ranks, stop, batch_size in ((2, 2, 6), (1, 4, 12), (2, None, 6)):
        results = run_on_gpus(_train, ranks, kind, tmp_path, stop, batch_size)
        weights = [result["weights"] for result in results]
    expected = plain(36, 12)[0]
    assert max(apart(rank_weights, expected) for rank_weights in weights) <= 1e-12
