"""Training on two and four CUDA devices equals training on one device with the whole batch."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import fail_on_gpus, run_on_gpus, stay_away
from step_models import batches, mlp, train_plainly
from torch import Tensor, nn
from weights import apart, whole_weights

from stepwrap.collectives import all_gather_object
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    SupervisedModel,
    build_mesh,
    wrap_model,
)

STEPS = 4
PER_RANK = 3
MAX_NORM = 0.5


def _wrap(kind: str, net: nn.Module, **options: Any) -> Any:
    """Wrap a network by `kind` on this rank's device."""
    model = SupervisedModel(net, nn.CrossEntropyLoss()).cuda()
    if kind == "hsdp":
        options["mesh"] = build_mesh({"replicate": 2, "shard": -1}, "cuda")
    if kind != "ddp":
        options["shard"] = ["Linear"]
    return wrap_model("ddp" if kind == "ddp" else "fsdp", model, **options)


def _whole_batches(dtype: torch.dtype) -> list[list[Tensor]]:
    return batches(STEPS, PER_RANK * dist.get_world_size(), dtype)


def _train(model: Any, optim: OptimWrapper, dtype: torch.dtype) -> list[float]:
    """Train on this rank's shares of the batches and return the losses."""
    losses = []
    for batch in _whole_batches(dtype):
        share = [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch]
        losses.append(model.train_step(share, optim)["loss"].item())
    return losses


def _norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def _compare(kind: str, has_norm: bool) -> float:
    """Return the largest difference of weights and buffers from plain training on one device."""
    make = _norm_net if has_norm else lambda: mlp(torch.float64)
    model = _wrap(kind, make(), **({"sync_batchnorm": True} if has_norm else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim = OptimWrapper(optimizer, clip_grad={"max_norm": MAX_NORM})
    _train(model, optim, torch.float64)
    plain = make().cuda()
    batches = [[tensor.cuda() for tensor in batch] for batch in _whole_batches(torch.float64)]
    train_plainly(plain, batches, momentum=0.9, max_norm=MAX_NORM)
    expected = SupervisedModel(plain, nn.CrossEntropyLoss())
    buffers = dict(model.module.named_buffers())
    weights_apart = apart(whole_weights(model.module), whole_weights(expected))
    return max(weights_apart, apart(buffers, dict(expected.named_buffers())) if buffers else 0.0)


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_follow_the_whole_batch(kind: str) -> None:
    assert max(run_on_gpus(_compare, 2, kind, False)) <= 1e-12


@pytest.mark.gpu4
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_four_ranks_follow_the_whole_batch(kind: str) -> None:
    assert max(run_on_gpus(_compare, 4, kind, False)) <= 1e-12


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_batchnorm_over_two_ranks_follows_the_whole_batch(kind: str) -> None:
    assert max(run_on_gpus(_compare, 2, kind, True)) <= 1e-11


def _train_in_bfloat16(kind: str) -> tuple[list[float], dict[str, Tensor], bool]:
    """Return this rank's losses, the whole weights, and whether the training changed them."""
    model = _wrap(kind, mlp())
    before = whole_weights(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = _train(model, AmpOptimWrapper(optimizer, dtype="bfloat16"), torch.float32)
    weights = whole_weights(model.module)
    has_changed = apart(weights, before) > 0
    return losses, {name: weight.cpu() for name, weight in weights.items()}, has_changed


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bfloat16_stays_finite_and_equal_on_the_ranks(kind: str) -> None:
    results = run_on_gpus(_train_in_bfloat16, 2, kind)
    for losses, weights, has_changed in results:
        assert torch.tensor(losses).isfinite().all()
        assert all(weight.isfinite().all() for weight in weights.values())
        assert has_changed
    assert apart(results[0][1], results[1][1]) == 0


def _leave_a_mesh(axes: dict[str, int], axis: str, how: str, folder: Path) -> list[int]:
    """Return the ranks of this rank's group of an axis; the last rank does not come.

    Ranks of other groups stay until the error, because one of them serves the store.
    """
    mesh = build_mesh(axes, "cuda")
    assert mesh.device_mesh is not None
    group, absent = mesh.device_mesh.get_group(axis), dist.get_world_size() - 1
    reduced = torch.ones(1, device="cuda")
    dist.all_reduce(reduced, group=group)
    assert reduced.item() == axes[axis]
    if dist.get_rank() == absent:
        stay_away(how)
    try:
        ranks = all_gather_object(dist.get_rank(), group)
    finally:
        if absent in dist.get_process_group_ranks(group):
            (folder / "failed").touch()
    while not (folder / "failed").exists():
        time.sleep(0.01)
    return ranks


@pytest.mark.gpu2
@pytest.mark.parametrize("how", ["sleep", "kill"])
def test_a_mesh_names_the_rank_that_does_not_come(how: str, tmp_path: Path) -> None:
    end = fail_on_gpus(_leave_a_mesh, 2, {"shard": 2}, "shard", how, tmp_path, absent=1)[0]
    assert end.exit_code == 1, end.output
    # After a death, the launcher's function adds the process to the error.
    assert re.search(r"^(CollectiveError|LaunchError): .*\brank 1\b", end.error, re.S), end.output


@pytest.mark.gpu4
@pytest.mark.parametrize(("axis", "failed"), [("shard", 2), ("replicate", 1)])
def test_a_group_of_a_mesh_names_the_rank_that_does_not_come(
    axis: str, failed: int, tmp_path: Path
) -> None:
    """Only the rank that shares a group with it fails; the two other ranks return."""
    axes = {"replicate": 2, "shard": 2}
    ends = fail_on_gpus(_leave_a_mesh, 4, axes, axis, "sleep", tmp_path, absent=3)
    assert ends[failed].exit_code == 1, ends[failed].output
    assert "CollectiveError: all_gather_object() must be reached" in ends[failed].output
    assert re.search(r"CollectiveError: .*\brank 3\b", ends[failed].output), ends[failed].output
    for rank in {0, 1, 2} - {failed}:
        assert ends[rank].value == ([0, 1] if axis == "shard" else [0, 2]), ends[rank].output
