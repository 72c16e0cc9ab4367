"""Limits of the training speed: slow data, hooks and ranks, by a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hook_runs import new_state, train
from listeners import Records
from marks import slow
from ranks import run_ranks
from torch import Tensor, nn

from stepwrap.collectives import get_rank
from stepwrap.loops import Hook, LoopState, ThroughputHook

PAUSE_S = 0.03
STEPS = 30


class Clock:
    """A clock that only the parts of a test advance, so that a busy machine changes no share."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_for_ranks(self, gradient: Tensor) -> None:
        """Advance to the clock of the slowest rank, as a reduction of gradients would."""
        if dist.is_initialized():
            latest = torch.tensor(self.now_s, dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX)
            self.now_s = latest.item()


clock = Clock()


class Pause(Hook):
    def on_update(self, state: LoopState) -> None:
        clock.now_s += PAUSE_S


class SlowLoader(Sequence[Any]):
    """A loader with a certain length: otherwise the ranks would wait for each other's batch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: Any) -> list[Tensor]:
        if not -STEPS <= index < STEPS:
            raise IndexError(index)
        clock.now_s += self._seconds
        return [torch.ones(2, 3), torch.ones(2, 1)]


class SlowNet(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(3, 1)
        self._seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        clock.now_s += self._seconds
        outputs = super().forward(inputs)
        if outputs.requires_grad:
            outputs.register_hook(clock.wait_for_ranks)
        return outputs


def limits(
    loading_s: float, forward_s: float, hooks: list[Hook], device: str = "cpu"
) -> tuple[dict[str, float], dict[str, float]]:
    """Train; return the limits and the record of the last interval."""
    records, state = Records(), new_state(net=SlowNet(forward_s).to(device))
    options = {"dataloader": SlowLoader(loading_s), "val_loop": None, "log_every_steps": 5}
    with patch("stepwrap.loops.hooks.monitors.perf_counter", clock):
        # The first interval is ignored.
        train(state, [*hooks, ThroughputHook(), records], epochs=1, **options)
    assert not state.model._forward_hooks
    return state.limits, records.records[-1]


def test_slow_loading_and_a_slow_hook_are_named() -> None:
    shares, record = limits(2 * PAUSE_S, 0.0, [Pause()])
    assert list(shares) == ["loading data", "hook Pause"]
    assert shares == pytest.approx({"loading data": 2 / 3, "hook Pause": 1 / 3})
    assert record["data_share"] == pytest.approx(2 / 3)
    assert record["hooks_share"] == pytest.approx(1 / 3)
    assert "slowest_rank" not in record


class DeviceWork(Hook):
    """Give the device work that lasts until the next batch, or wait until it has none."""

    order = 90

    def __init__(self, is_busy: bool) -> None:
        self._is_busy = is_busy

    def on_update(self, state: LoopState) -> None:
        if self._is_busy:
            torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
        else:
            torch.cuda.synchronize()

    def on_batch_end(self, state: LoopState, batch: Any, logs: Any) -> None:
        self.on_update(state)


class PauseAfterWork(Pause):
    order = 91


@pytest.mark.gpu
@pytest.mark.parametrize("is_busy", [False, True])
def test_time_in_which_the_device_still_works_is_no_limit(is_busy: bool) -> None:
    hooks = [DeviceWork(is_busy), PauseAfterWork()]
    _, record = limits(2 * PAUSE_S, 0.0, hooks, device="cuda")
    # A record, here after five steps, waits for the device, which then waits for the next batch.
    data_share, hooks_share = (2 / 15, 0.0) if is_busy else (2 / 3, 1 / 3)
    assert record["data_share"] == pytest.approx(data_share)
    assert record["hooks_share"] == pytest.approx(hooks_share)


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
        assert shares["rank 2"] == pytest.approx(2 / 3)
        assert shares["hook Pause"] == pytest.approx(1 / 3)
        assert ("loading data" in shares) == (cause == "loading")
        assert record["slowest_rank"] == 2
        assert record["rank_wait_share"] == pytest.approx(2 / 3)
    assert results[0] == results[1] == results[2]


def limits_of_equal_ranks() -> dict[str, float]:
    return limits(0.0, PAUSE_S, [Pause()])[0]


@pytest.mark.slow
def test_equal_ranks_are_not_slow() -> None:
    for shares in run_ranks(limits_of_equal_ranks, 2):
        assert list(shares) == ["hook Pause"]
