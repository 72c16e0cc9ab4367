"""Uneven inputs in a custom loop, against what torch's documentation promises."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import assert_near, on_ranks
from step_models import batches, classifier, flat, mlp, sgd, train
from torch import Tensor, nn

from stepwrap.wrappers import StepDistributedDataParallel

COUNTS = (5, 2, 3)


def _plain(by_all: bool, ranks: int) -> Tensor:
    net = mlp(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = [batches(COUNTS[rank], dtype=torch.float64, seed=rank) for rank in range(ranks)]
    for index in range(max(COUNTS)):
        present = [batches_[index] for batches_ in data if index < len(batches_)]
        losses = [nn.functional.cross_entropy(net(x), y) for x, y in present]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / (ranks if by_all else len(present))).backward()
        optimizer.step()
    return flat(net)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("by_all", "options"),
    [(True, {}), (False, {}), (True, {"find_unused_parameters": True})]
    + [(True, {"comm_hook": "allreduce"}), (True, {"gradient_as_bucket_view": True})],
)
@on_ranks("ranks")
def test_numbers(ranks: int, by_all: bool, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier(torch.float64), **options)
    optim = sgd(model)
    data = batches(COUNTS[rank], dtype=torch.float64, seed=rank)
    filters = list(warnings.filters)
    with model.join(divide_by_initial_world_size=by_all):
        train(model, data, optim)
    assert list(warnings.filters) == filters
    if rank == 0:
        # Outside of it a forward does not wait for other ranks.
        model(*data[-1], mode="loss")
    assert optim.inner_count == COUNTS[rank]
    assert_near(flat(model), _plain(by_all, ranks), 1e-12)


@on_ranks(2)
def test_ending_all_with_the_first() -> None:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier())
    optim = sgd(model)
    told = ("at least one rank that exhausted inputs", "Rank 1 exhausted all inputs")
    with pytest.raises(RuntimeError, match=told[rank]), model.join(throw_on_early_termination=True):
        train(model, batches(COUNTS[rank], seed=rank), optim)
    assert optim.inner_count == 2


@on_ranks(2)
def test_an_error_inside_passes_through() -> None:
    model = StepDistributedDataParallel(classifier())
    with pytest.raises(KeyError), model.join():
        raise KeyError("inside")
    train(model, batches(1))
