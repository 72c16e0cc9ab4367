"""Uneven inputs in a loop of one's own, against what torch's documentation promises."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_models import batches, classifier, flat, mlp, sgd
from torch import Tensor, nn

from stepwrap.wrappers import StepDistributedDataParallel

COUNTS = (5, 2, 3)


def _train(by_all: bool, **options: Any) -> tuple[Tensor, int]:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier(torch.float64), **options)
    optim = sgd(model)
    filters = list(warnings.filters)
    with model.join(divide_by_initial_world_size=by_all):
        for batch in batches(COUNTS[rank], dtype=torch.float64, seed=rank):
            model.train_step(batch, optim)
    assert list(warnings.filters) == filters
    if rank == 0:
        # Outside of it a forward waits for nobody.
        model(*batch, mode="loss")
    return flat(model), optim.inner_count


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
def test_numbers(ranks: int, by_all: bool, options: dict[str, Any]) -> None:
    expected = _plain(by_all, ranks)
    results = run_ranks(_train, ranks, by_all, **options)
    assert [count for _, count in results] == list(COUNTS[:ranks])
    for weights, _ in results:
        assert (weights - expected).abs().max().item() <= 1e-12


def _early() -> tuple[int, str]:
    rank = dist.get_rank()
    model = StepDistributedDataParallel(classifier())
    optim = sgd(model)

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for batch in batches(COUNTS[rank], seed=rank):
                model.train_step(batch, optim)

    with pytest.raises(RuntimeError) as error:
        train()
    return optim.inner_count, str(error.value)


def test_ending_all_with_the_first() -> None:
    (left, told), (ended, why) = run_ranks(_early, 2)
    assert (left, ended) == (2, 2)
    assert "at least one rank that exhausted inputs" in told
    assert "Rank 1 exhausted all inputs" in why


def _error_inside() -> bool:
    model = StepDistributedDataParallel(classifier())
    with pytest.raises(KeyError), model.join():
        raise KeyError("inside")
    model.train_step(batches(1)[0], sgd(model))
    return True


def test_an_error_inside_passes_through() -> None:
    assert run_ranks(_error_inside, 2) == [True, True]
