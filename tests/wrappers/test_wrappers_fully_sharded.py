"""Fully sharded training in several processes, compared with plain PyTorch."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_runs import Block, own_batches, supervised, train, train_plainly, whole
from marks import slow
from on_ranks import assert_near, gathered, on_ranks, raises_with
from step_models import sgd
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepwrap.wrappers import Mesh, StepFullyShardedDataParallel, build_mesh

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("optimizer", ["adamw", *slow("momentum")])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, *slow(4)])
@on_ranks("ranks")
def test_equals_plain_pytorch(
    dtype: torch.dtype, optimizer: str, accumulate: int, ranks: int
) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "accumulate": accumulate}
    expected = train_plainly("Net", dtype, ranks=ranks, **settings)
    assert_near(train("Net", dtype, shard=["Block"], **settings), expected, BOUNDS[dtype])


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


# With more ranks the parts of parameters change, but not the effects of the options.
UNEVEN = [OPTIONS[3], OPTIONS[7], *(option for option in OPTIONS if option[0] != "Net")]


@pytest.mark.parametrize(("ranks", "cases"), [(2, OPTIONS), *slow((4, UNEVEN))], ids=["2", "4"])
@pytest.mark.slow
@on_ranks("ranks")
def test_options_change_no_number(ranks: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for kind, options in cases:
        settings = {name: options[name] for name in ("optimizer", "accumulate") if name in options}
        weights = train(kind, **options)
        expected = train_plainly(kind, torch.float64, ranks=ranks, **settings)
        if kind == "Normed":
            # The running variance over ranks is computed by another formula.
            expected = {name: value for name, value in expected.items() if "running" not in name}
            weights = {name: weights[name] for name in expected}
        assert_near(weights, expected, 1e-12)


@pytest.mark.slow
@on_ranks(4)
def test_meshes_change_no_number() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    cases: list[dict[str, Any]] = [
        {"mesh": build_mesh({"data": 4})},
        {"mesh": build_mesh({"replicate": 2, "shard": 2})},
        {"mesh": build_mesh({"replicate": 2, "shard": -1}), "accumulate": 3},
        {"mesh": mesh},
        {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"},
        {"process_group": dist.group.WORLD},
        {"process_group": groups, "sharding_strategy": "HYBRID_SHARD"},
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
        {"reshard_after_forward": 2},
    ]
    expected = {count: train_plainly(ranks=4, accumulate=count) for count in (1, 3)}
    for options in cases:
        weights = train(shard=["Block"], **options)
        assert_near(weights, expected[options.get("accumulate", 1)], 1e-12)


@on_ranks(4)
def test_a_mesh_over_some_of_the_ranks() -> None:
    """Two pairs of ranks train independently, each on its own mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))
    rank_0, second, third, fourth = gathered(train(mesh=mesh["data"], shard=["Block"]))
    assert_near(rank_0, train_plainly(ranks=2), 1e-12)
    assert_near(rank_0, second, 0)
    assert_near(third, fourth, 0)
    assert max((rank_0[name] - third[name]).abs().max() for name in rank_0) > 1e-3


@on_ranks(2)
def test_parameters_of_two_dtypes() -> None:
    weights = train("TwoDtypes", torch.float32, shard=["Block"])
    assert weights["head.weight"].dtype == torch.float64
    assert_near(weights, train_plainly("TwoDtypes", torch.float32, ranks=2), 2e-6)


class Doubling(StepFullyShardedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        with optim_wrapper.optim_context(self):
            losses = self(*self.module.data_preprocessor(data, True), mode="loss")
        loss = losses["loss"] * 2
        optim_wrapper.update_params(loss / 2)
        return {"doubled": loss.detach()}


@on_ranks(2)
def test_a_subclass_with_a_custom_step() -> None:
    weights = train(shard=["Block"], wrapper=Doubling, accumulate=3)
    assert_near(weights, train_plainly(ranks=2, accumulate=3), 1e-12)


@on_ranks(2)
def test_an_optimizer_made_before_wrapping() -> None:
    model = supervised(dtype=torch.float32)
    optim = sgd(model, accumulative_counts=2)
    wrapper = StepFullyShardedDataParallel(model, shard=["Block"])
    batch_1, second, *_ = own_batches(dist.get_rank(), torch.float32)
    wrapper.train_step(batch_1, optim)
    texts = (
        "no parameter of SGD has a gradient at its first update",
        "create the optimizer after wrapping",
    )
    with raises_with(RuntimeError, *texts):
        wrapper.train_step(second, optim)


def _train_over(mesh: Mesh | DeviceMesh) -> dict[str, Tensor]:
    model = StepFullyShardedDataParallel(supervised(), shard=["Block"], mesh=mesh)
    optim = sgd(model, momentum=0.9)
    for batch in own_batches(dist.get_rank(), torch.float64):
        # Results of an operation use the mesh that torch caches for it.
        norm = sum(param.square().sum().full_tensor() for param in model.parameters())
        assert norm.item() > 0
        model.train_step(batch, optim)
    return whole(model.module.net)


def _sum_split_layer(mesh: DeviceMesh) -> None:
    layer = distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)])
    assert layer.sum().full_tensor() == 12


@pytest.mark.slow
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(4)
def test_a_new_world_in_the_same_processes(by_torch: bool, tmp_path: Path) -> None:
    expected = train_plainly(ranks=4)
    # Groups are numbered; the second world has fewer.
    for _ in range(3):
        dist.new_group()
    rank = dist.get_rank()
    for store in ("first", "second"):
        if by_torch:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            assert_near(_train_over(mesh), expected, 1e-12)
        else:
            ours = build_mesh({"replicate": 2, "shard": 2})
            assert ours.device_mesh is not None
            # Use split layers before and after the other wrapper fills torch's caches.
            _sum_split_layer(ours.device_mesh)
            assert_near(_train_over(ours), expected, 1e-12)
            _sum_split_layer(ours.device_mesh)
        dist.destroy_process_group()
        file = dist.FileStore(str(tmp_path / store), 4)
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=4, timeout=timeout)
