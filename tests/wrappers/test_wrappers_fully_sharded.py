"""Fully sharded training against plain PyTorch, over real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, largest_difference, network, own_batches, train, train_plainly
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from stepwrap.wrappers import (
    OptimWrapper,
    StepFullyShardedDataParallel,
    SupervisedModel,
    build_mesh,
)

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


def _agrees(results: list[dict[str, Tensor]], expected: dict[str, Tensor], bound: float) -> None:
    for weights in results:
        assert largest_difference(weights, expected) <= bound


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("optimizer", ["adamw", *slow("momentum")])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, *slow(4)])
def test_equals_plain_pytorch(
    dtype: torch.dtype, optimizer: str, accumulate: int, ranks: int
) -> None:
    """C-5 for shards; the last of the windows is cut short."""
    settings: dict[str, Any] = {"optimizer": optimizer, "accumulate": accumulate}
    expected = train_plainly("Net", dtype, ranks=ranks, **settings)
    results = run_ranks(train, ranks, "Net", dtype, shard=["Block"], **settings)
    _agrees(results, expected, BOUNDS[dtype])


def _each(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    return [train(kind, **options) for kind, options in cases]


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Net", {}),
    ("Net", {"shard": "Linear"}),
    ("Net", {"shard": ["net.blocks.0", "Block"]}),
    ("Net", {"shard": {"min_params": 60}}),
    ("Net", {"shard": [Block], "reshard_after_forward": False}),
    ("Net", {"shard": "Linear", "cpu_offload": True}),
    ("Net", {"shard": "Linear", "cpu_offload": {"offload_params": True, "pin_memory": True}}),
    ("Net", {"shard": "Linear", "prefetch": 1, "accumulate": 3}),
    ("Net", {"shard": "Linear", "prefetch": {"forward": 2, "backward": 3}}),
    ("Net", {"shard": "Block", "forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"}),
    ("Net", {"shard": "Block", "sharding_strategy": "SHARD_GRAD_OP"}),
    ("Net", {"auto_wrap_policy": "always_wrap_policy"}),
    ("Net", {"auto_wrap_policy": {"type": "size_based_auto_wrap_policy", "min_num_params": 99}}),
    (
        "Net",
        {"auto_wrap_policy": {"type": "ModuleWrapPolicy", "module_classes": ["Linear", "Block"]}},
    ),
    ("Net", {"shard": "Block", "detect_anomalous_params": True}),
    ("Net", {"mixed_precision": {"param_dtype": "float64", "reduce_dtype": "float64"}}),
    ("Frozen", {"shard": "Block", "accumulate": 3}),
    ("Frozen", {"shard": "Linear", "optimizer": "adamw"}),
    ("Tied", {"shard": ["Block", "Linear"]}),
    ("Tied", {"accumulate": 3}),
    ("Small", {"shard": "Linear"}),
    ("Small", {"optimizer": "adamw", "accumulate": 3}),
    ("Normed", {"shard": "Block", "sync_batchnorm": True}),
]


# More ranks change what each of them has of a parameter, not what an option does.
UNEVEN = [OPTIONS[3], OPTIONS[7], *(one for one in OPTIONS if one[0] != "Net")]


@pytest.mark.parametrize(("ranks", "cases"), [(2, OPTIONS), *slow((4, UNEVEN))], ids=["2", "4"])
@pytest.mark.slow
def test_options_change_no_number(ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    results = run_ranks(_each, ranks, cases)
    for at, (kind, options) in enumerate(cases):
        settings = {one: options[one] for one in ("optimizer", "accumulate") if one in options}
        expected = train_plainly(kind, torch.float64, ranks=ranks, **settings)
        if kind == "Normed":
            # Its running variance comes from another formula over ranks.
            expected = {name: one for name, one in expected.items() if "running" not in name}
            for weights in results:
                weights[at] = {name: weights[at][name] for name in expected}
        for weights in results:
            assert largest_difference(weights[at], expected) <= 1e-12, (kind, options)


def _meshes() -> list[dict[str, Tensor]]:
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    wanted: list[dict[str, Any]] = [
        {"mesh": build_mesh({"data": 4})},
        {"mesh": build_mesh({"replicate": 2, "shard": 2})},
        {"mesh": build_mesh({"replicate": 2, "shard": -1}), "accumulate": 3},
        {"mesh": mesh},
        {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"},
        {"process_group": world},
        {"process_group": groups, "sharding_strategy": "HYBRID_SHARD"},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
        {"reshard_after_forward": 2},
    ]
    return [train(shard=["Block"], **options) for options in wanted]


@pytest.mark.slow
def test_meshes_change_no_number() -> None:
    once = train_plainly(ranks=4)
    accumulated = train_plainly(ranks=4, accumulate=3)
    for results in run_ranks(_meshes, 4):
        for at, weights in enumerate(results):
            expected = accumulated if at == 2 else once
            assert largest_difference(weights, expected) <= 1e-12, at


def _pairs() -> dict[str, Tensor]:
    """Two independent pairs of ranks, each over a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))
    return train(mesh=mesh["data"], shard=["Block"])


def test_a_mesh_over_some_of_the_ranks() -> None:
    first, second, third, fourth = run_ranks(_pairs, 4)
    assert largest_difference(first, train_plainly(ranks=2)) <= 1e-12
    assert largest_difference(first, second) == largest_difference(third, fourth) == 0
    assert largest_difference(first, third) > 1e-3


def _two_dtypes() -> dict[str, Tensor]:
    return train("TwoDtypes", torch.float32, shard=["Block"])


def test_parameters_of_two_dtypes() -> None:
    expected = train_plainly("TwoDtypes", torch.float32, ranks=2)
    for weights in run_ranks(_two_dtypes, 2):
        assert weights["head.weight"].dtype == torch.float64
        assert largest_difference(weights, expected) <= 2e-6


class Doubling(StepFullyShardedDataParallel):
    """A step of its own."""

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        loss = losses["loss"] * 2
        optim_wrapper.update_params(loss / 2)
        return {"doubled": loss.detach()}


def test_a_subclass_with_its_own_step() -> None:
    expected = train_plainly(ranks=2, accumulate=3)
    _agrees(run_ranks(train, 2, shard=["Block"], wrapper=Doubling, accumulate=3), expected, 1e-12)


def _made_too_early() -> str:
    model = SupervisedModel(network("Net", torch.float32), nn.CrossEntropyLoss())
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper = StepFullyShardedDataParallel(model, shard=["Block"])
    first, second, *_ = own_batches(dist.get_rank(), torch.float32)
    wrapper.train_step(first, optim)
    with pytest.raises(RuntimeError) as caught:
        wrapper.train_step(second, optim)
    return str(caught.value)


def test_an_optimizer_of_the_parameters_before() -> None:
    for told in run_ranks(_made_too_early, 2):
        assert "no parameter of SGD has a gradient at its first update" in told
        assert "create the optimizer after wrapping" in told
