"""Buffers that differ between the ranks: evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listeners import stop_at
from own_buffers import (
    KINDS,
    LR,
    centred_net,
    flat_weights,
    make_batches,
    make_runner,
    train_plainly,
)
from ranks import on_ranks
from torch import Tensor, nn

from stepwrap.loops import (
    CheckpointHook,
    Hook,
    LoopState,
    MeanLoss,
    SWAHook,
    ValLoop,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.runner import Runner
from stepwrap.wrappers import OptimWrapper, SupervisedModel, wrap_model
from stepwrap.wrappers.steps.buffers import buffers_of_first_rank


def assert_trained_plainly(model: nn.Module) -> None:
    torch.testing.assert_close(flat_weights(model), train_plainly(), rtol=0, atol=1e-12)


def same_on_ranks(tensor: Tensor) -> bool:
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, tensor)
    return torch.equal(*of_ranks)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@on_ranks(2)
def test_validations_do_not_change_the_training(kind: str, options: dict[str, Any]) -> None:
    runner = make_runner(kind, options, validates=True)
    runner.train()
    assert_trained_plainly(runner.state.model)


@on_ranks(2)
def test_the_statistics_of_an_average_do_not_change_the_training() -> None:
    """SWAHook runs the model in training mode to compute the statistics of its BatchNorm layers."""
    kind, options = KINDS[0]
    plain, averaged = (
        make_runner(kind, options, validates=True, hooks=hooks)
        for hooks in ({}, {"swa": SWAHook(from_epoch=1)})
    )
    for runner in (plain, averaged):
        net = runner.state.model.module.net
        net.insert(3, nn.BatchNorm1d(6, affine=False).double())
        runner.train()
    assert torch.equal(flat_weights(plain.state.model), flat_weights(averaged.state.model))


class Seen(nn.Module):
    """Count the evaluated samples in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = centred_net()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.seen += len(inputs)
        return self.net(inputs)


@pytest.mark.parametrize("inference_mode", [False, True])
@on_ranks(2)
def test_buffers_that_an_evaluation_changes_keep_their_values(inference_mode: bool) -> None:
    rank = dist.get_rank()
    net = Seen()
    model = wrap_model("separate", SupervisedModel(net, nn.MSELoss()))
    net.net[1].mean += rank
    metrics = {"loss": MeanLoss()}
    loop = ValLoop(make_batches(rank), metrics, inference_mode=inference_mode, per_rank=True)
    Runner(model, val_loop=loop, hooks=()).validate()
    assert net.seen == 24
    assert net.net[1].mean.eq(rank).all()


@on_ranks(2)
def test_ranks_share_buffers_only_in_the_context() -> None:
    rank = dist.get_rank()
    model = wrap_model("ddp", SupervisedModel(centred_net(), nn.MSELoss()), broadcast_buffers=False)
    mean = model.module.net[1].mean
    mean += rank
    with buffers_of_first_rank(model):
        assert not mean.any()
    assert mean.eq(rank).all()


def saved_buffers(run_dir: Path) -> list[Any]:
    """Return the buffers in the file of each rank; None if it has no such entry."""
    path = find_checkpoint(run_dir)
    assert path is not None
    checkpoint = load_checkpoint(path)
    return [checkpoint.read(f"rank_{rank:05d}").get("buffers") for rank in range(2)]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@on_ranks(2)
def test_a_resumed_run_continues_with_the_buffers_of_each_rank(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def make(**hooks: Hook) -> Runner:
        named = {"checkpoint": CheckpointHook(), **hooks}
        return make_runner(kind, options, run_dir=tmp_path, hooks=named)

    make(stop=stop_at(4)).train()
    of_first, of_second = saved_buffers(tmp_path)
    assert of_first == {}
    assert list(of_second) == ["net.1.mean"]
    runner = make()
    runner.train(resume="latest")
    assert_trained_plainly(runner.state.model)


@on_ranks(2)
def test_buffers_are_not_stored_if_they_are_equal_or_copied(tmp_path: Path) -> None:
    for name, options in (("copied", {}), ("equal", {"broadcast_buffers": False})):
        runner = make_runner("ddp", options)
        if name == "copied":
            runner.train()
        save_checkpoint(tmp_path / name / "checkpoints", runner.state)
        assert saved_buffers(tmp_path / name) == [None, None]


@on_ranks(2)
def test_inside_a_window_ddp_continues_with_the_buffers_of_each_rank(tmp_path: Path) -> None:
    """ddp copies the buffers of the first rank only before the first forward of a window."""
    rank = dist.get_rank()

    def make() -> LoopState:
        state = make_runner("ddp", {}).state
        optimizer = torch.optim.SGD(state.model.parameters(), lr=LR)
        state.optim_wrapper = OptimWrapper(optimizer, accumulative_counts=2)
        return state

    state = make()
    state.model.train_step(make_batches(rank)[0], state.optim_wrapper)
    state.iteration = state.batch = 1
    resumed = make()
    load_checkpoint(save_checkpoint(tmp_path, state)).restore(resumed)
    for run_state in (state, resumed):
        run_state.model.train_step(make_batches(rank)[1], run_state.optim_wrapper)
    mean, resumed_mean = (run_state.model.module.net[1].mean for run_state in (state, resumed))
    assert torch.equal(mean, resumed_mean)
    assert not same_on_ranks(mean)
