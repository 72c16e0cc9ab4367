"""A CNN with BatchNorm on the digits: two replicas or two ranks train like full batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import gathered, on_ranks
from sklearn.datasets import load_digits
from torch import Tensor, nn

from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDataParallel,
    StepDistributedDataParallel,
    SupervisedModel,
)

STEPS = 50
BATCH = 32
# Rounding errors grow over the steps; in fp64 they stay far below the fp32 tolerance.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


def _batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(dtype).unsqueeze(1) / 16
    target = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[: STEPS * BATCH].view(STEPS, BATCH)
    return [(images[rows], target[rows]) for rows in chosen]


def _model(dtype: torch.dtype) -> SupervisedModel:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )
    return SupervisedModel(net.to(dtype), nn.CrossEntropyLoss())


def _train(wrapper: Any, batches: list[Any]) -> tuple[dict[str, Tensor], list[float]]:
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9))
    wrapper.train()
    losses = [wrapper.train_step(batch, optim_wrapper)["loss"].mean().item() for batch in batches]
    return {key: value.clone() for key, value in wrapper.module.state_dict().items()}, losses


def _largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(actual) == list(expected)
    return max(
        ((actual[key] - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1)).item()
        for key in actual
        if actual[key].is_floating_point()
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_two_replicas_follow_the_full_batch(dtype: torch.dtype) -> None:
    expected, expected_losses = _train(SingleDevice(_model(dtype)), _batches(dtype))
    wrapper = StepDataParallel(_model(dtype), ["cpu", "cpu"], sync_batchnorm=True)
    got, losses = _train(wrapper, _batches(dtype))
    assert _largest_difference(got, expected) <= TOLERANCES[dtype]
    assert losses == pytest.approx(expected_losses, abs=10 * TOLERANCES[dtype])
    assert losses[-1] < losses[0] / 3
    assert got["net.1.num_batches_tracked"] == STEPS


@pytest.mark.parametrize("dtype", TOLERANCES)
@on_ranks(2)
def test_two_ranks_follow_the_full_batch(dtype: torch.dtype) -> None:
    expected, expected_losses = _train(SingleDevice(_model(dtype)), _batches(dtype))
    half = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
    batches = [(images[half], target[half]) for images, target in _batches(dtype)]
    wrapper = StepDistributedDataParallel(_model(dtype), sync_batchnorm=True)
    got, losses = _train(wrapper, batches)
    assert _largest_difference(got, expected) <= TOLERANCES[dtype]
    assert got["net.1.num_batches_tracked"] == STEPS
    means = [sum(pair) / 2 for pair in zip(*gathered(losses), strict=True)]
    assert means == pytest.approx(expected_losses, abs=10 * TOLERANCES[dtype])
