"""Batches of weight zero leave no trace in running statistics and other buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import Unsized
from marks import slow
from ranks import on_ranks
from torch import Tensor, nn

from stepwrap.loops import EpochTrainLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    SupervisedModel,
    uncounted_batch,
    wrap_model,
)

# Rank 0 has one batch, rank 1 has three.
COUNTS = (1, 3)


def normed_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers, nn.Linear(4, 1)).double()


def make_batches(rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3 + rank)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return [
        [torch.randn(8, 3, **options) * (3 - 2 * rank) + 2, torch.randn(8, 1, **options)]
        for _ in range(COUNTS[rank])
    ]


def train_plainly(window: int) -> dict[str, Tensor]:
    """Train on the batches of both ranks, joined batch by batch."""
    net = normed_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [make_batches(rank) for rank in range(2)]
    for start in range(0, max(COUNTS), window):
        optimizer.zero_grad()
        total = 0
        for at in range(start, min(start + window, max(COUNTS))):
            present = [batches[at] for batches in data if at < len(batches)]
            inputs, targets = map(torch.cat, zip(*present, strict=True))
            nn.functional.mse_loss(net(inputs), targets, reduction="sum").backward()
            total += len(inputs)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad /= total
        optimizer.step()
    return net.state_dict()


def train(wrapper: nn.Module, batches: Any, window: int = 1) -> dict[str, Tensor]:
    """Train for one epoch; return the state of the net with whole tensors."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    optim_wrapper = OptimWrapper(optimizer, window, loss_weight="samples")
    loop = EpochTrainLoop(batches, max_epochs=1, per_rank=True)
    Runner(wrapper, loop, optim_wrapper=optim_wrapper, hooks=()).train()
    state = wrapper.module.net.state_dict()  # type: ignore[union-attr, operator]
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}


@pytest.mark.parametrize(
    ("kind", "sized", "window"),
    [
        ("ddp", True, 1),
        ("fsdp", False, 2),
        *slow(("ddp", False, 2), ("fsdp", True, 1), ("separate", True, 1)),
    ],
)
@on_ranks(2)
def test_synchronised_statistics_leave_them_out(kind: str, sized: bool, window: int) -> None:
    model = SupervisedModel(normed_net(), nn.MSELoss())
    wrapper = wrap_model(kind, model, sync_batchnorm=True)
    batches = make_batches(dist.get_rank())
    state = train(wrapper, batches if sized else Unsized(batches), window)
    for name, expected in train_plainly(window).items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-12, msg=name)


@on_ranks(2)
def test_statistics_of_one_rank_leave_them_out() -> None:
    rank = dist.get_rank()
    model = SupervisedModel(normed_net(), nn.MSELoss())
    wrapper = wrap_model("ddp", model, broadcast_buffers=False)
    state = train(wrapper, make_batches(rank))
    assert state["1.num_batches_tracked"] == COUNTS[rank]
    if rank == 0:
        net = normed_net()
        net(make_batches(rank)[0][0])
        torch.testing.assert_close(state["1.running_var"], net[1].running_var, rtol=0, atol=1e-15)


def test_a_batch_that_only_ends_a_window_leaves_no_trace() -> None:
    """The loader does not state its length, and its three batches end inside a window of two."""
    wrapper = SingleDevice(SupervisedModel(normed_net(), nn.MSELoss()))
    state = train(wrapper, Unsized(make_batches(1)), 2)
    assert state["1.num_batches_tracked"] == 3


@on_ranks(2)
def test_own_loops_leave_them_out_by_a_context() -> None:
    rank = dist.get_rank()
    wrapper = wrap_model("ddp", SupervisedModel(normed_net(), nn.MSELoss()), sync_batchnorm=True)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    optim_wrapper = OptimWrapper(optimizer, loss_weight="samples")
    batches = make_batches(rank)
    for at in range(max(COUNTS)):
        if at < len(batches):
            wrapper.train_step(batches[at], optim_wrapper)
        else:
            with uncounted_batch(wrapper, optim_wrapper):
                wrapper.train_step(batches[-1], optim_wrapper)
    assert optim_wrapper.batch_counts
    state = wrapper.module.net.state_dict()
    for name, expected in train_plainly(1).items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-12, msg=name)


@on_ranks(2)
def test_torchs_synchronised_layers_are_refused() -> None:
    """torch's layers train on GPUs only, so the error is raised before the first step."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(normed_net())
    model = SupervisedModel(net, nn.MSELoss())
    with pytest.raises(ValueError, match=r"module\.net\.1 must .*SynchronizedBatchNorm, got"):
        train(wrap_model("fsdp", model), make_batches(dist.get_rank()))
