"""Parameter groups under every wrapper, and on ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from param_runs import grouped, small_net, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

from stepwrap.wrappers import (
    Preparation,
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
    ZeroRedundancyOptimizer,
    build_mesh,
    param_groups,
    wrap_model,
)
from stepwrap.wrappers.optimizers.optimizer_fit import build_optimizer
from stepwrap.wrappers.optimizers.param_groups import named_parameters


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compiled":
        return SingleDevice(torch.compile(model, backend="eager"))
    if kind == "compiled inside":
        model.net = torch.compile(model.net, backend="eager")
        return SingleDevice(model)
    return SingleDevice(model) if kind == "single" else model


@pytest.mark.parametrize("kind", ["bare", "single", "compiled", "compiled inside"])
def test_names_are_the_users_own(kind: str) -> None:
    model = SupervisedModel(small_net(), nn.MSELoss())
    names = [name for name, _ in model.named_parameters()]
    assert [one.name for one in named_parameters(wrapped(kind, copy.deepcopy(model)))] == names


GROUPS = [
    ("other", 1.0, 0.5, 1),
    ("bias flat", 1.0, 0.25, 1),
    ("norm", 1.0, 0.0, 2),
    ("net.2.*", 3.0, 0.5, 2),
]


def groups_of(model: nn.Module) -> list[tuple[str, float, float, int]]:
    groups = grouped(
        model, custom_keys={"net.2.*": {"lr_mult": 3}}, norm_decay_mult=0, flat_decay_mult=0.5
    )
    return [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in groups]


@on_ranks(2)
def test_groups_are_the_same_under_all_wrappers_and_on_all_ranks() -> None:
    plan = Preparation(
        tensor_parallel={"net.0": "colwise", "net.2": "rowwise"},
        activation_checkpointing=["LayerNorm"],
        compile={"backend": "eager"},
    )
    wrappers = (
        SingleDevice,
        StepDistributedDataParallel,
        SeparateDistributedDataParallel,
        StepFullyShardedDataParallel,
    )
    models = [wrap(SupervisedModel(small_net(), nn.MSELoss())) for wrap in wrappers]
    for axes, wrapper in (
        ({"tensor": 2}, None),
        ({"data": 2}, None),
        ({"shard": 1, "tensor": 2}, StepFullyShardedDataParallel),
    ):
        prepare = plan if "tensor" in axes else Preparation(compile={"backend": "eager"})
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        model = SupervisedModel(net, nn.MSELoss())
        models.append(wrap_model(wrapper, model, mesh=build_mesh(axes), prepare=prepare))
    assert [groups_of(model) for model in models] == [GROUPS] * 7


def test_groups_are_the_same_over_copies_on_devices() -> None:
    model = StepDataParallel(SupervisedModel(small_net(), nn.MSELoss()), ["cpu", "cpu"])
    assert groups_of(model) == GROUPS


SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
PARAMWISE = {"norm_decay_mult": 0.0, "custom_keys": {"2.weight": {"lr_mult": 0.1}}}


@on_ranks(2)
def test_groups_of_an_optimizer_that_shards_its_state() -> None:
    results = []
    for cls, more in ((AdamW, {}), (ZeroRedundancyOptimizer, {"optimizer_class": AdamW})):
        model = small_net()
        groups = param_groups(model, paramwise=PARAMWISE, optimizer=AdamW, **SETTINGS)
        optimizer = build_optimizer(cls, groups, **SETTINGS, **more)
        results.append(train(model, groups, lambda _, made=optimizer: made))
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) <= 1e-14


@pytest.mark.parametrize("cls", [AdamW, SGD])
@on_ranks(2)
def test_sharded_training_equals_whole(cls: Any) -> None:
    whole, sharded = small_net(), small_net()
    fully_shard(sharded)
    results = []
    for model in (whole, sharded):
        groups = param_groups(model, paramwise=PARAMWISE, optimizer=cls, **SETTINGS)
        optimizer = build_optimizer(cls, groups, **SETTINGS)
        results.append(train(model, groups, lambda _, made=optimizer: made))
    pairs = zip(*results, strict=True)
    assert max((a - b.full_tensor()).abs().max().item() for a, b in pairs) <= 1e-14
