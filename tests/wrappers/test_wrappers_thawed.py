"""Parameters that are frozen when the model is wrapped, and thawed in training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gan_models import Gan, gan_batches, optimizers
from ranks import run_ranks
from step_models import batches, classifier, flat, sgd
from torch import Tensor

from stepwrap.wrappers import (
    SeparateDistributedDataParallel,
    SingleDevice,
    StepDistributedDataParallel,
)


def _thaw_late() -> tuple[str, float]:
    """Return the error's text, and how far the ranks' weights are apart afterwards."""
    wrapper = StepDistributedDataParallel(_half_frozen())
    last = wrapper.module.net[2]
    optim = sgd(wrapper)
    data = batches(3, seed=dist.get_rank())
    wrapper.train_step(data[0], optim)
    last.requires_grad_(True)
    with torch.no_grad():
        wrapper(*data[1], mode="loss")
    with pytest.raises(RuntimeError) as caught:
        wrapper.train_step(data[1], optim)
    last.requires_grad_(False)
    wrapper.train_step(data[2], optim)
    firsts = flat(wrapper)
    dist.broadcast(firsts, 0)
    return str(caught.value), (flat(wrapper) - firsts).abs().max().item()


def _half_frozen() -> Any:
    model = classifier()
    model.net[2].requires_grad_(False)
    return model


def test_what_would_not_be_averaged_is_named() -> None:
    for told, difference in run_ranks(_thaw_late, 2):
        assert told.startswith("'net.2.weight' was frozen when StepDistributedDataParallel wrapped")
        assert difference == 0


def _train_in_phases(wrapper: Any, data: list[list[Tensor]]) -> Tensor:
    """As the error advises: wrapped while all is trained, then frozen, then thawed."""
    optim = sgd(wrapper)
    for index, batch in enumerate(data):
        wrapper.module.net[2].requires_grad_(index >= 2)
        wrapper.train_step(batch, optim)
    return flat(wrapper)


def _advised() -> Tensor:
    wrapper = StepDistributedDataParallel(classifier(torch.float64), find_unused_parameters=True)
    rank = dist.get_rank()
    halves = [[part[rank::2] for part in batch] for batch in batches(4, dtype=torch.float64)]
    return _train_in_phases(wrapper, halves)


def test_the_advice_trains_like_one_process() -> None:
    alone = _train_in_phases(
        SingleDevice(classifier(torch.float64)), batches(4, dtype=torch.float64)
    )
    for weights in run_ranks(_advised, 2):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)


def _thaw_a_sibling() -> str:
    """A child that was wholly frozen has no wrapper that could look."""
    model = Gan()
    wrapper = SeparateDistributedDataParallel(model)
    model.features.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        wrapper.train_step(gan_batches(1, dist.get_rank())[0], optimizers(model))
    return str(caught.value)


def test_separate_names_it_too() -> None:
    for told in run_ranks(_thaw_a_sibling, 2):
        assert told.startswith("'features.weight' was frozen when SeparateDistributedDataParallel")


def _thaw_alone() -> float:
    wrapper = StepDistributedDataParallel(_half_frozen())
    wrapper.module.net[2].requires_grad_(True)
    before = flat(wrapper)
    wrapper.train_step(batches(1)[0], sgd(wrapper))
    return (flat(wrapper) - before)[-1].abs().item()


def test_one_rank_has_nobody_to_differ_from() -> None:
    assert run_ranks(_thaw_alone, 1)[0] > 0
