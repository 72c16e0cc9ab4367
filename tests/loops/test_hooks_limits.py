"""Limits of the training speed: slow data, hooks and ranks, simulated by sleeping."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hook_runs import new_state, train
from listeners import Records
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.collectives import get_rank
from stepwrap.loops import Hook, LoopState, ThroughputHook

PAUSE_S = 0.03
STEPS = 30


class Pause(Hook):
    def on_update(self, state: LoopState) -> None:
        time.sleep(PAUSE_S)


class SlowLoader(Sequence[Any]):
    """A loader with a certain length: otherwise the ranks would wait for each other's batch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: Any) -> list[Tensor]:
        if not -STEPS <= index < STEPS:
            raise IndexError(index)
        time.sleep(self._seconds)
        return [torch.ones(2, 3), torch.ones(2, 1)]


class SlowNet(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(3, 1)
        self._seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return super().forward(inputs)


def limits(
    loading_s: float, forward_s: float, hooks: list[Hook]
) -> tuple[dict[str, float], dict[str, float]]:
    """Train; return the limits and the record of the last interval."""
    records, state = Records(), new_state(net=SlowNet(forward_s))
    hooks = [*hooks, ThroughputHook(), records]
    # The first interval is ignored.
    train(
        state, hooks, epochs=1, dataloader=SlowLoader(loading_s), val_loop=None, log_every_steps=5
    )
    assert not state.model._forward_hooks
    return state.limits, records.records[-1]


def test_slow_loading_and_a_slow_hook_are_named() -> None:
    shares, record = limits(2 * PAUSE_S, 0.0, [Pause()])
    assert list(shares) == ["loading data", "hook Pause"]
    assert 0.5 < shares["loading data"] < 0.75
    assert 0.2 < shares["hook Pause"] < 0.45
    assert record["data_share"] == pytest.approx(shares["loading data"], abs=0.15)
    assert record["hooks_share"] == pytest.approx(shares["hook Pause"], abs=0.15)
    assert "slowest_rank" not in record


def limits_with_slow_rank(cause: str) -> tuple[dict[str, float], dict[str, float]]:
    slow_s = 2 * PAUSE_S if get_rank() == 2 else 0.0
    loading_s, forward_s = (slow_s, 0.0) if cause == "loading" else (0.0, slow_s)
    return limits(loading_s, forward_s, [Pause()])


@pytest.mark.parametrize("cause", ["loading", *slow("forward")])
def test_a_slow_rank_is_named(cause: str) -> None:
    results: list[Any] = run_ranks(limits_with_slow_rank, 3, cause)
    for shares, record in results:
        # A step spends 0.03 s in the hook on all ranks, and 0.06 s more on rank 2.
        assert next(iter(shares)) == "rank 2"
        assert 0.45 < shares["rank 2"] < 0.7
        assert 0.2 < shares["hook Pause"] < 0.45
        assert ("loading data" in shares) == (cause == "loading")
        assert record["slowest_rank"] == 2
        assert record["rank_wait_share"] == pytest.approx(shares["rank 2"], abs=0.15)
    assert results[0] == results[1] == results[2]


def limits_of_equal_ranks() -> dict[str, float]:
    return limits(0.0, PAUSE_S, [Pause()])[0]


@pytest.mark.slow
def test_equal_ranks_are_not_slow() -> None:
    for shares in run_ranks(limits_of_equal_ranks, 2):
        assert list(shares) == ["hook Pause"]
