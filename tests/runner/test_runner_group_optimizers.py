"""Optimizers that communicate between ranks or need whole tensors, in configs."""

from __future__ import annotations

from typing import Any

import pytest
from marks import slow
from parallel_runs import OPTIMIZERS, PLAN, settings, train_plainly, trained
from ranks import RanksError, run_ranks
from weights import apart

from stepwrap.runner import Runner
from stepwrap.runner.failure import BuildError

TP = {"tensor_parallel": {"plan": PLAN}}
MESHES = [(2, {"tensor": 2}), *slow((4, {"data": 2, "tensor": 2}))]
ZERO = {"type": "ZeroRedundancyOptimizer", "optimizer_class": "AdamW", **OPTIMIZERS["AdamW"]}
LOCAL = {"type": "PostLocalSGD", "optimizer_class": "SGD", "period": 2, **OPTIMIZERS["SGD"]}


def make_config(mesh: dict[str, int], optimizer: dict[str, Any]) -> dict[str, Any]:
    return settings(mesh.get("data", 1), mesh=mesh, optimizer=optimizer, **TP)


@pytest.mark.parametrize(("ranks", "mesh"), MESHES)
@pytest.mark.parametrize("optimizer", [ZERO, LOCAL])
def test_split_layers_are_stepped_by_ranks_with_the_same_parts(
    ranks: int, mesh: dict[str, int], optimizer: dict[str, Any]
) -> None:
    plain = optimizer["optimizer_class"]
    expected = train_plainly({**settings(), "optimizer": {"type": plain, **OPTIMIZERS[plain]}})
    for weights in run_ranks(trained, ranks, make_config(mesh, optimizer)):
        assert apart(weights, expected) <= 1e-12


def _built(config: dict[str, Any]) -> None:
    Runner.from_config(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Adafactor", "scales by norms of whole tensors"),
        ("Rprop", "selects elements by sign"),
        ("SparseAdam", "needs sparse gradients"),
    ],
)
def test_refused_under_fsdp(name: str, message: str) -> None:
    config = settings(2, wrapper={"type": "fsdp"}, optimizer={"type": name})
    with pytest.raises(RanksError, match=f"optimizer: .*{name} {message}.*AdamW"):
        run_ranks(_built, 2, config)


@pytest.mark.parametrize("optimizer", [ZERO, LOCAL])
def test_refused_under_fsdp_which_does_it_itself(optimizer: dict[str, Any]) -> None:
    config = settings(2, wrapper={"type": "fsdp"}, optimizer=optimizer)
    with pytest.raises(
        RanksError, match=f"optimizer[.a-z_]*: .*{optimizer['type']}.* is a DTensor"
    ):
        run_ranks(_built, 2, config)


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam"])
def test_refused_with_split_layers(name: str) -> None:
    config = make_config({"tensor": 2}, {"type": name})
    with pytest.raises(RanksError, match=f"optimizer: .*{name}.* is split by tensor_parallel"):
        run_ranks(_built, 2, config)


def test_no_closures() -> None:
    with pytest.raises(BuildError, match="optim_wrapper: .*LBFGS needs a closure"):
        Runner.from_config(settings(optimizer={"type": "LBFGS"}))
