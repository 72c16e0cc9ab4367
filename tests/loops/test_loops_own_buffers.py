"""Buffers that differ between the ranks: evaluations do not change the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_buffers import KINDS, batches_of, centred_net, flat_weights, make_runner, train_plainly
from ranks import on_ranks
from torch import Tensor, nn

from stepwrap.loops import MeanLoss, SWAHook, ValLoop
from stepwrap.runner import Runner
from stepwrap.wrappers import SupervisedModel, wrap_model
from stepwrap.wrappers.steps.buffers import buffers_of_first_rank


def assert_trained_plainly(model: nn.Module) -> None:
    torch.testing.assert_close(flat_weights(model), train_plainly(), rtol=0, atol=1e-12)


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
    loop = ValLoop(batches_of(rank), metrics, inference_mode=inference_mode, per_rank=True)
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
