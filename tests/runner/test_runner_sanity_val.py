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


def _weights_by_rank(form: str, tried: bool) -> dict[str, Tensor]:
    shares = 1 if form == "tensor" else 2
    config = settings(shares, seed=1, **PLACES[form])
    config["model"]["net"]["dropout"] = 0.5
    config["train"]["sanity_val"] = tried
    # The last batch of rank 1 is shorter.
    config["data"]["val"] = {"dataset": {"type": Sentences}, "batch_size": BATCH + 1}
    config["metrics"] = {"loss": {"type": "MeanLoss"}}
    runner = Runner.from_config(config)
    runner.train()
    weights = whole_weights(runner.state.model.module)
    return {**weights, "loss": torch.tensor(runner.state.metrics["loss"])}


@pytest.mark.parametrize("form", ["ddp", *slow("fsdp", "tensor")])
def test_weights_of_parallel_runs_do_not_depend_on_it(form: str) -> None:
    plain = run_ranks(_weights_by_rank, 2, form, False)
    tried = run_ranks(_weights_by_rank, 2, form, True)
    for plain_weights, tried_weights in zip(plain, tried, strict=True):
        assert plain_weights.keys() == tried_weights.keys()
        assert all(torch.equal(plain_weights[name], tried_weights[name]) for name in plain_weights)
