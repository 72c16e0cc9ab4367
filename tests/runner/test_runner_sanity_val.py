"""The validation batch before training does not change a parallel run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow
from parallel_runs import BATCH, PLAN, Sentences, settings
from ranks import run_ranks
from torch import Tensor
from weights import whole_weights

from stepwrap.runner import Runner

PLACES: dict[str, dict[str, Any]] = {
    "ddp": {"wrapper": {"type": "ddp"}},
    "fsdp": {"wrapper": {"type": "fsdp", "shard": ["Block"]}},
    "tensor": {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": PLAN}},
}


def _weights_by_rank(place: str, tried: bool) -> dict[str, Tensor]:
    shares = 1 if place == "tensor" else 2
    config = settings(shares, seed=1, **PLACES[place])
    config["model"]["net"]["dropout"] = 0.5
    config["train"]["sanity_val"] = tried
    # The last batch of rank 1 is shorter.
    config["data"]["val"] = {"dataset": {"type": Sentences}, "batch_size": BATCH + 1}
    config["metrics"] = {"loss": {"type": "MeanLoss"}}
    runner = Runner.from_config(config)
    runner.train()
    found = whole_weights(runner.state.model.module)
    return {**found, "loss": torch.tensor(runner.state.metrics["loss"])}


@pytest.mark.parametrize("place", ["ddp", *slow("fsdp", "tensor")])
def test_weights_of_parallel_runs_do_not_depend_on_it(place: str) -> None:
    plain = run_ranks(_weights_by_rank, 2, place, False)
    tried = run_ranks(_weights_by_rank, 2, place, True)
    for left, right in zip(plain, tried, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
