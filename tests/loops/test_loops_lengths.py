"""Lengths that loaders state are estimates: windows, polls and passes end with the data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import assert_identical, get_weights
from marks import slow
from ranks import run_ranks
from stream_parts import SaveAll
from torch import Tensor, nn
from torchmetrics import SumMetric

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    IterTrainLoop,
    LoopState,
    ValLoop,
    load_checkpoint,
)
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

WINDOW = 4
# Two windows and three batches of a third.
BATCHES = 11


def batches_of_rank(rank: int = 0, count: int = BATCHES) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        [torch.randn(2, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 2])]
        for _ in range(count)
    ]


class Stating:
    """A loader with a position that states any length; None for no length."""

    def __init__(self, batches: list[Any], stated: int | None) -> None:
        self.batches, self.stated, self.at = batches, stated, 0

    def __len__(self) -> int:
        if self.stated is None:
            raise TypeError("no length")
        return self.stated

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def make_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def make_state(window: int = WINDOW, wrapper: Any = SingleDevice) -> LoopState:
    model = wrapper(SupervisedModel(make_net(), nn.CrossEntropyLoss()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    clip = {"max_norm": 0.5}
    return LoopState(model, OptimWrapper(optimizer, accumulative_counts=window, clip_grad=clip))


def plain_weights(epochs: int, ranks: int = 1) -> Tensor:
    """Train in plain PyTorch; the last window has the mean of its losses."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    data = list(zip(*(batches_of_rank(rank) * epochs for rank in range(ranks)), strict=True))
    for start in range(0, len(data), WINDOW):
        window = [batch for batches in data[start : start + WINDOW] for batch in batches]
        optimizer.zero_grad()
        losses = [nn.functional.cross_entropy(net(inputs), target) for inputs, target in window]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net.weight.detach()


@pytest.mark.parametrize("stated", [None, 9, 11, 14])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_last_window_has_the_mean_of_its_batches(
    stated: int | None, epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    EpochTrainLoop(Stating(batches_of_rank(), stated), max_epochs=epochs).run(state, HookList())
    assert (get_weights(state)["net.weight"] - plain_weights(epochs)).abs().max() < 1e-14
    assert state.step == -(-BATCHES * epochs // WINDOW)
    # Said once, and not in each pass.
    warnings = re.findall(f"11 batches .*states {stated}:", caplog.text)
    assert len(warnings) == (stated in (9, 14))
    assert state.max_steps == (state.step if stated == BATCHES else None)


def _train_on_ranks(wrapper: Any) -> tuple[Tensor, int]:
    state = make_state(wrapper=wrapper)
    loader = Stating(batches_of_rank(dist.get_rank()), 14)
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList())
    weight = state.model.module.net.weight.detach()  # type: ignore[union-attr]
    return getattr(weight, "full_tensor", lambda: weight)(), state.step


@pytest.mark.parametrize(
    "wrapper", [StepDistributedDataParallel, *slow(StepFullyShardedDataParallel)]
)
def test_the_last_window_is_averaged_over_the_ranks(wrapper: Any) -> None:
    for weight, steps in run_ranks(_train_on_ranks, 2, wrapper):
        assert (weight - plain_weights(1, ranks=2)).abs().max() < 1e-14
        assert steps == 3


@pytest.mark.parametrize("stated", [9, *slow(None, 14)])
def test_a_resume_in_any_pass_is_exact(tmp_path: Path, stated: int | None) -> None:
    state, hook = make_state(), SaveAll(tmp_path)
    EpochTrainLoop(Stating(batches_of_rank(), stated), max_epochs=2).run(state, HookList([hook]))
    for done, path in hook.saved:
        resumed = make_state()
        load_checkpoint(path).restore(resumed)
        again = SaveAll()
        loader = Stating(batches_of_rank(), stated)
        EpochTrainLoop(loader, max_epochs=2).run(resumed, HookList([again]))
        assert len(again.read) == 2 * BATCHES - done
        assert_identical(get_weights(resumed), get_weights(state))


def test_a_wrong_length_is_not_used_after_a_resume(tmp_path: Path) -> None:
    hook = SaveAll(tmp_path)
    loop = EpochTrainLoop(Stating(batches_of_rank(), 9), max_epochs=2)
    loop.run(make_state(), HookList([hook]))
    resumed = make_state()
    load_checkpoint(hook.saved[-2][1]).restore(resumed)
    EpochTrainLoop(Stating(batches_of_rank(), 9), max_epochs=4).run(resumed, HookList())
    assert (resumed.epoch, resumed.max_steps) == (4, None)


def test_a_loop_by_steps_does_not_use_a_wrong_length_again() -> None:
    state = make_state()
    IterTrainLoop(Stating(batches_of_rank(), 14), max_steps=6).run(state, HookList())
    assert (state.step, state.iteration, state.max_epochs) == (6, 24, None)


def _train_apart(counts: tuple[int, ...]) -> tuple[str, int]:
    rank, state = dist.get_rank(), make_state(1, StepDistributedDataParallel)
    loader = Stating(batches_of_rank(rank, counts[rank]), 10)
    with pytest.raises(ValueError, match="same number of training batches") as caught:
        EpochTrainLoop(loader, max_epochs=1).run(state, HookList())
    return str(caught.value), state.step


def test_ranks_that_run_out_before_the_stated_length_are_named_at_once() -> None:
    for text, steps in run_ranks(_train_apart, 3, (5, 3, 5)):
        assert re.search("rank 1 ran out .*3 batches .*epoch 1", text)
        assert "ranks 0, 2 did not" in text
        assert steps == 3


def _validate_apart(counts: tuple[int, ...]) -> tuple[float, int]:
    rank, state = dist.get_rank(), make_state(1, StepDistributedDataParallel)
    val_loader = Stating(batches_of_rank(rank, counts[rank]), 10)
    val_loop = ValLoop(val_loader, {"samples": Samples()})
    loop = EpochTrainLoop(batches_of_rank(rank, 2), max_epochs=2, val_loop=val_loop)
    loop.run(state, HookList())
    return state.metrics["samples"], state.step


class Samples(SumMetric):
    def update(self, num_samples: int) -> None:
        super().update(num_samples)


def test_a_validation_of_ranks_that_run_out_before_the_stated_length() -> None:
    assert run_ranks(_validate_apart, 2, (5, 8)) == [(26.0, 4)] * 2
