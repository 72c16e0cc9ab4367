"""Parameters that are frozen when the model is wrapped, and thawed in training."""

from typing import Any

import torch
import torch.distributed as dist
from gan_models import Gan, gan_batches, optimizers
from on_ranks import assert_near, on_ranks, raises_with, same_on_ranks
from step_models import batches, classifier, flat, sgd, train
from torch import Tensor

from stepwrap.wrappers import (
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
)


def _half_frozen() -> Any:
    model = classifier()
    model.net[2].requires_grad_(False)
    return model


@on_ranks(2)
def test_what_would_not_be_averaged_is_named() -> None:
    wrapper = StepDistributedDataParallel(_half_frozen())
    last = wrapper.module.net[2]
    optim = sgd(wrapper)
    data = batches(3, seed=dist.get_rank())
    wrapper.train_step(data[0], optim)
    last.requires_grad_(True)
    with torch.no_grad():
        wrapper(*data[1], mode="loss")
    told = "'net.2.weight' was frozen when StepDistributedDataParallel wrapped"
    with raises_with(RuntimeError, told):
        wrapper.train_step(data[1], optim)
    last.requires_grad_(False)
    wrapper.train_step(data[2], optim)
    assert same_on_ranks(flat(wrapper))


def _train_in_phases(wrapper: Any, data: list[list[Tensor]]) -> Tensor:
    """As the error advises: wrapped while all is trained, then frozen, then thawed."""
    optim = sgd(wrapper)
    for index, batch in enumerate(data):
        wrapper.module.net[2].requires_grad_(index >= 2)
        wrapper.train_step(batch, optim)
    return flat(wrapper)


@on_ranks(2)
def test_the_advice_trains_like_one_process() -> None:
    data = batches(4, dtype=torch.float64)
    alone = _train_in_phases(SingleDevice(classifier(torch.float64)), data)
    wrapper = StepDistributedDataParallel(classifier(torch.float64), find_unused_parameters=True)
    halves = [[part[dist.get_rank() :: 2] for part in batch] for batch in data]
    assert_near(_train_in_phases(wrapper, halves), alone, 1e-12)


@on_ranks(2)
def test_separate_names_it_too() -> None:
    """A child that was wholly frozen has no wrapper that could look."""
    model = Gan()
    wrapper = SeparateDistributedDataParallel(model)
    model.features.requires_grad_(True)
    told = "'features.weight' was frozen when SeparateDistributedDataParallel"
    with raises_with(RuntimeError, told):
        train(wrapper, gan_batches(1, dist.get_rank()), optimizers(model))


@on_ranks(1)
def test_one_rank_has_nobody_to_differ_from() -> None:
    wrapper = StepDistributedDataParallel(_half_frozen())
    wrapper.module.net[2].requires_grad_(True)
    before = flat(wrapper)
    train(wrapper, batches(1))
    assert (flat(wrapper) - before)[-1].abs() > 0
