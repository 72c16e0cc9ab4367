"""Schedulers that act during a part of the run, compared with rates by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hook_runs import new_state, rates, train
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, StepLR

from stepwrap.loops import Hook, LoopState, SchedulerHook, ScheduleWindow


def new_optimizer() -> Optimizer:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_it_acts_from_after_to_until() -> None:
    optimizer = new_optimizer()
    window = ScheduleWindow(optimizer, partial(ExponentialLR, gamma=0.5), after=2, until=5)
    expected = [[1], [1], [1], [0.5], [0.25], [0.25], [0.25], [0.25]]
    assert rates(optimizer, 8, window) == expected


def test_warm_up_and_cosine_one_after_the_other() -> None:
    optimizer = new_optimizer()
    warm_up = ScheduleWindow(
        optimizer, partial(LinearLR, start_factor=0.25, total_iters=3), until=4
    )
    cosine = ScheduleWindow(optimizer, partial(CosineAnnealingLR, T_max=4), after=3, until=8)
    expected = [0.25, 0.5, 0.75, 1.0, 0.853553391, 0.5, 0.146446609, 0.0, 0.0]
    found = [rate for (rate,) in rates(optimizer, 9, warm_up, cosine)]
    assert found == pytest.approx(expected, abs=1e-9)


def test_making_it_changes_nothing_before_its_time() -> None:
    optimizer = new_optimizer()
    before = dict(optimizer.param_groups[0])
    ScheduleWindow(optimizer, partial(LinearLR, start_factor=0.25, total_iters=3), after=2)
    assert optimizer.param_groups[0] == before
    with pytest.raises(ValueError, match="factor"):
        ScheduleWindow(optimizer, partial(LinearLR, start_factor=7.0), after=2)


@pytest.mark.parametrize("stop", [1, 3])
def test_it_resumes_from_its_state(stop: int) -> None:
    def window(optimizer: Optimizer) -> ScheduleWindow:
        return ScheduleWindow(optimizer, partial(StepLR, step_size=2, gamma=0.5), after=2, until=7)

    whole, first, second = new_optimizer(), new_optimizer(), new_optimizer()
    expected = rates(whole, 9, window(whole))
    begun = window(first)
    rates(first, stop, begun)
    rest = window(second)
    second.load_state_dict(first.state_dict())
    rest.load_state_dict(begun.state_dict())
    assert rates(second, 9 - stop, rest) == expected[stop:]


def test_mistakes() -> None:
    make = partial(ExponentialLR, gamma=0.5)
    with pytest.raises(ValueError, match=r"until must be greater than after \(3\), got 3"):
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
    state, seen = new_state(accumulative_counts=2), UpdateRates()
    optimizer = state.optim_wrapper.optimizer  # type: ignore[union-attr]
    start = optimizer.param_groups[0]["lr"]
    train(state, [SchedulerHook([(ExponentialLR(optimizer, 0.5), "batch")]), seen])
    # The update at the end of batch 1, 3, ... comes after 1, 3, ... steps of the schedule.
    assert seen.used == pytest.approx([start * 0.5**n for n in (1, 3, 5, 7)])
