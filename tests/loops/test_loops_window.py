"""Schedulers that act during a part of the run, compared with rates by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hook_runs import new_state, rates, train
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from stepwrap.loops import Hook, LoopState, PolyLR, SchedulerHook, ScheduleWindow
from stepwrap.loops.hooks.scheduler import By


def new_optimizer() -> Optimizer:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_it_acts_from_after_to_until() -> None:
    optimizer = new_optimizer()
    window = ScheduleWindow(optimizer, partial(ExponentialLR, gamma=0.5), after=2, until=5)
    expected = [[1], [1], [1], [0.5], [0.25], [0.125], [0.125], [0.125]]
    assert rates(optimizer, 8, window) == expected


def test_warm_up_and_cosine_one_after_the_other() -> None:
    optimizer = new_optimizer()
    warm_up = ScheduleWindow(
        optimizer, partial(LinearLR, start_factor=0.25, total_iters=3), until=3
    )
    cosine = ScheduleWindow(optimizer, partial(CosineAnnealingLR, T_max=4), after=3, until=7)
    expected = [0.25, 0.5, 0.75, 1.0, 0.853553391, 0.5, 0.146446609, 0.0, 0.0]
    actual = [rate for (rate,) in rates(optimizer, 9, warm_up, cosine)]
    assert actual == pytest.approx(expected, abs=1e-9)


def triangle(step: float, peak: float, end: float, *, low: float, final: float) -> float:
    """Return a rate that rises linearly from `low` to 1 at `peak`, then falls to `final`."""
    if step <= peak:
        return low + (1 - low) * step / peak
    return 1 + (final - 1) * (step - peak) / (end - peak)


# A schedule of four steps from a rate of 1, and its closed form.
LAWS: dict[str, tuple[Callable[[Optimizer], LRScheduler], Callable[[int], float]]] = {
    "constant": (partial(ConstantLR, factor=0.5, total_iters=4), lambda n: 0.5 if n < 4 else 1),
    "linear": (
        partial(LinearLR, start_factor=0.5, end_factor=0.25, total_iters=4),
        lambda n: 0.5 - 0.25 * n / 4,
    ),
    "exponential": (partial(ExponentialLR, gamma=0.9), lambda n: 0.9**n),
    "step": (partial(StepLR, step_size=2), lambda n: 0.1 ** (n // 2)),
    "multi-step": (
        partial(MultiStepLR, milestones=[1, 4]),
        lambda n: 0.1 ** ((n >= 1) + (n >= 4)),
    ),
    "lambda": (partial(LambdaLR, lr_lambda=lambda n: 1 / (1 + n)), lambda n: 1 / (1 + n)),
    "multiplicative": (partial(MultiplicativeLR, lr_lambda=lambda n: 0.9), lambda n: 0.9**n),
    "polynomial": (partial(PolynomialLR, total_iters=4, power=2), lambda n: (1 - n / 4) ** 2),
    "polynomial with a minimum": (
        partial(PolyLR, total_iters=4, power=2, eta_min=0.1),
        lambda n: 0.1 + 0.9 * (1 - n / 4) ** 2,
    ),
    "cosine": (
        partial(CosineAnnealingLR, T_max=4, eta_min=0.1),
        lambda n: 0.1 + 0.45 * (1 + math.cos(math.pi * n / 4)),
    ),
    "restarts": (
        partial(CosineAnnealingWarmRestarts, T_0=3),
        lambda n: (1 + math.cos(math.pi * (n % 3) / 3)) / 2,
    ),
    "cyclic": (
        partial(CyclicLR, base_lr=0.1, max_lr=1, step_size_up=2, cycle_momentum=False),
        lambda n: triangle(n, 2, 4, low=0.1, final=0.1),
    ),
    # Its five rates belong to the steps 0 to 4.
    "one cycle": (
        partial(
            OneCycleLR,
            max_lr=1,
            total_steps=5,
            pct_start=0.4,
            anneal_strategy="linear",
            cycle_momentum=False,
        ),
        lambda n: triangle(n, 1, 4, low=1 / 25, final=1 / 25e4),
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_every_schedule_between_a_warm_up_and_a_constant_rate(name: str) -> None:
    make, law = LAWS[name]
    optimizer = new_optimizer()
    warm_up = partial(LinearLR, start_factor=0.1, total_iters=3)
    windows = [
        ScheduleWindow(optimizer, warm_up, until=3),
        ScheduleWindow(optimizer, make, after=3, until=7),
    ]
    expected = [0.1 + 0.3 * n for n in range(3)] + [law(min(n, 4)) for n in range(7)]
    used = [rate for (rate,) in rates(optimizer, 10, *windows)]
    assert used == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("by", ["epoch", "step", "batch"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_warm_up_hands_over_the_full_rate(by: By, is_reversed: bool) -> None:
    state, used = new_state(lr=0.003), dict[int, float]()
    optimizer = state.optim_wrapper.optimizer
    warm_up = partial(LinearLR, start_factor=0.1, total_iters=3)
    # This scheduler sets its first rate when it is created.
    cosine = partial(CosineAnnealingWarmRestarts, T_0=5)
    pairs: list[tuple[ScheduleWindow, By]] = [
        (ScheduleWindow(optimizer, warm_up, until=3), by),
        (ScheduleWindow(optimizer, cosine, after=3), by),
    ]

    class Rates(Hook):
        def on_batch_start(self, state: LoopState, batch: Any) -> None:
            count = {"epoch": state.epoch, "step": state.step, "batch": state.iteration}[by]
            used.setdefault(count, optimizer.param_groups[0]["lr"])

    hook = SchedulerHook(pairs[::-1] if is_reversed else pairs)
    train(state, [hook, Rates()], epochs=8, val_loop=None)
    factors = [0.1, 0.4, 0.7, *((1 + math.cos(math.pi * n / 5)) / 2 for n in range(5))]
    assert [used[n] for n in range(8)] == pytest.approx(
        [0.003 * factor for factor in factors], rel=1e-12
    )


def fits(*pairs: tuple[Any, By], **totals: int | None) -> dict[str, bool]:
    """Return the messages about schedules that do not fit a run, and whether they distort it."""
    state = new_state()
    state.max_steps, state.max_epochs = totals.get("steps"), totals.get("epochs")
    state.max_iterations = totals.get("batches")
    return {misfit.text: misfit.distorts for misfit in SchedulerHook(pairs).misfits(state)}


def test_schedules_that_fit_the_run() -> None:
    optimizer = new_optimizer()
    warm_up = partial(LinearLR, total_iters=3)
    pairs: list[tuple[Any, By]] = [
        (ScheduleWindow(optimizer, warm_up, until=3), "epoch"),
        (ScheduleWindow(optimizer, partial(CosineAnnealingLR, T_max=5), after=3), "epoch"),
        (CosineAnnealingLR(optimizer, 40), "step"),
        # The last update gets the last rate, or the one before it.
        (CosineAnnealingLR(optimizer, 39), "step"),
        (PolyLR(optimizer, 30, eta_min=0.1), "step"),
        (OneCycleLR(optimizer, 1, total_steps=80, cycle_momentum=False), "batch"),
        (LinearLR(optimizer, total_iters=3), "epoch"),
        (
            SequentialLR(optimizer, [warm_up(optimizer), CosineAnnealingLR(optimizer, 37)], [3]),
            "step",
        ),
        (MultiStepLR(optimizer, [1, 2]), "step"),
    ]
    assert fits(*pairs, epochs=8, steps=40, batches=80) == {}
    assert fits(*pairs) == {}


@pytest.mark.parametrize(
    ("make", "text", "distorts"),
    [
        (
            partial(CosineAnnealingLR, T_max=5),
            "CosineAnnealingLR counts updates: T_max is 5, but it acts for 8: the rate rises again "
            "after 5; set T_max: 8",
            True,
        ),
        (partial(CosineAnnealingLR, T_max=50), "set T_max: 8", False),
        (
            partial(OneCycleLR, max_lr=1, total_steps=6, cycle_momentum=False),
            "stays at its minimum after 6; set total_steps: 8",
            True,
        ),
        (
            partial(OneCycleLR, max_lr=1, total_steps=9, cycle_momentum=False),
            "set total_steps: 8",
            False,
        ),
        (partial(PolynomialLR, total_iters=4), "the rate is 0 after 4; set total_iters: 8", True),
        (partial(PolyLR, total_iters=4), "the rate is 0 after 4", True),
        (partial(PolyLR, total_iters=40), "set total_iters: 8", False),
        (partial(LinearLR, end_factor=0, total_iters=4), "the rate is 0 after 4", True),
        (partial(LinearLR, total_iters=9), "does not reach its last rate", False),
        (
            partial(ScheduleWindow, make=partial(LinearLR, total_iters=5), until=3),
            "total_iters is 5, but it acts for 3: it does not reach its last rate; set "
            "total_iters: 3",
            True,
        ),
        (
            partial(ScheduleWindow, make=partial(CosineAnnealingLR, T_max=2), after=3, until=7),
            "the rate rises again after 5; set T_max: 4",
            True,
        ),
        (
            partial(ScheduleWindow, make=partial(CosineAnnealingLR, T_max=2), after=8),
            "it starts after 8, but the run has 8",
            False,
        ),
        (
            lambda o: SequentialLR(o, [ConstantLR(o), CosineAnnealingLR(o, 3)], [2]),
            "the rate rises again after 5; set T_max: 6",
            True,
        ),
        (lambda o: ChainedScheduler([CosineAnnealingLR(o, 5)]), "set T_max: 8", True),
    ],
)
def test_schedules_that_do_not_fit_the_run(
    make: Callable[[Optimizer], Any], text: str, distorts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = new_state()
    schedule = make(state.optim_wrapper.optimizer)
    ((message, is_distorted),) = fits((schedule, "step"), steps=8).items()
    assert text in message
    assert is_distorted == distorts
    train(state, [SchedulerHook([(schedule, "step")])], val_loop=None)
    assert caplog.messages == ([message] if distorts else [])


def test_a_cycle_keeps_its_last_rate(caplog: pytest.LogCaptureFixture) -> None:
    state = new_state()
    optimizer = state.optim_wrapper.optimizer
    cycle = OneCycleLR(
        optimizer, 0.5, total_steps=4, anneal_strategy="linear", cycle_momentum=False
    )
    train(state, [SchedulerHook([(cycle, "step")])], val_loop=None)
    # torch computes -0.17 for the step after the last one, and raises at the next.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 / 25e4)
    assert any("OneCycleLR" in message for message in caplog.messages)


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["float", "tensor"])
def test_making_it_changes_nothing_before_its_time(rate: float | Tensor) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    before = dict(optimizer.param_groups[0])
    ScheduleWindow(optimizer, partial(LinearLR, start_factor=0.25, total_iters=3), after=2)
    assert optimizer.param_groups[0] == before
    assert optimizer.param_groups[0]["lr"] == 1
    with pytest.raises(ValueError, match="factor"):
        ScheduleWindow(optimizer, partial(LinearLR, start_factor=7.0), after=2)


@pytest.mark.parametrize("stop", [1, 3])
def test_it_resumes_from_its_state(stop: int) -> None:
    def window(optimizer: Optimizer) -> ScheduleWindow:
        return ScheduleWindow(optimizer, partial(StepLR, step_size=2, gamma=0.5), after=2, until=7)

    reference, stopped, second = new_optimizer(), new_optimizer(), new_optimizer()
    expected = rates(reference, 9, window(reference))
    begun = window(stopped)
    rates(stopped, stop, begun)
    resumed = window(second)
    second.load_state_dict(stopped.state_dict())
    resumed.load_state_dict(begun.state_dict())
    assert rates(second, 9 - stop, resumed) == expected[stop:]


def test_mistakes() -> None:
    make = partial(ExponentialLR, gamma=0.5)
    with pytest.raises(ValueError, match=r"until .*greater than after \(3\), got 3"):
        ScheduleWindow(new_optimizer(), make, after=3, until=3)
    with pytest.raises(ValueError, match="after must be at least 0"):
        ScheduleWindow(new_optimizer(), make, after=-1)


class UpdateRates(Hook):
    def __init__(self) -> None:
        self.used: list[float] = []

    def on_train_start(self, state: LoopState) -> None:
        optimizer = state.optim_wrapper.optimizer  # type: ignore[union-attr]
        optimizer.register_step_post_hook(
            lambda optimizer, *_: self.used.append(optimizer.param_groups[0]["lr"])
        )


def test_by_batch_counts_batches_within_a_window_of_accumulation() -> None:
    state, rates_hook = new_state(accumulative_counts=2), UpdateRates()
    optimizer = state.optim_wrapper.optimizer  # type: ignore[union-attr]
    start = optimizer.param_groups[0]["lr"]
    train(state, [SchedulerHook([(ExponentialLR(optimizer, 0.5), "batch")]), rates_hook])
    # The update at the end of batch 1, 3, ... comes after 1, 3, ... steps of the schedule.
    assert rates_hook.used == pytest.approx([start * 0.5**n for n in (1, 3, 5, 7)])
