"""When validations and saves are due, and how many batches and updates a run has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .state import LoopState


class Cadence:
    """Every so many updates, epochs or seconds of training; several may be given, None is never.

    Ask `due_step` after each update and `due_epoch` after each epoch, usually in `on_save_point`.
    The answer is the same on every rank.

    Raises:
        ValueError: A number is not positive, or a count is not whole.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_secs: float | None = None,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1 or null, got {value!r}")
        if every_secs is not None and not every_secs > 0:
            raise ValueError(f"every_secs must be > 0 or null, got {every_secs!r}")
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.every_secs = every_secs
        # On the clock of `state.clock_s`; the first question after a start sets it.
        self.due_at_s = math.inf if every_secs is None else -math.inf

    def due_step(self, state: LoopState) -> bool:
        """Say whether the time has come by the updates or by the clock."""
        by_steps = self.every_steps is not None and state.step % self.every_steps == 0
        # Asked at every update: no call while the time has not come.
        by_clock = state.clock_s >= self.due_at_s and self._due_by_clock(state)
        return state.step > 0 and (by_steps or by_clock)

    def due_epoch(self, state: LoopState) -> bool:
        """Say whether an epoch has just ended (`state.batch` is 0) and is one of those due."""
        if self.every_epochs is None or state.batch or not state.epoch:
            return False
        return state.epoch % self.every_epochs == 0

    def _due_by_clock(self, state: LoopState) -> bool:
        assert self.every_secs is not None
        first = self.due_at_s == -math.inf
        self.due_at_s = state.clock_s + self.every_secs
        return not first


class ValSchedule:
    """After which finished units (epochs or steps) a validation is due; always after the last.

    From each milestone of `dynamic` on there is another interval.
    """

    def __init__(
        self,
        unit: str,
        last: int,
        begin: int,
        interval: int,
        dynamic: Sequence[tuple[int, int]] | None,
    ) -> None:
        if int(last) != last:
            raise AssertionError(f"max_{unit} must be a whole number, got {last!r}")
        self.last = positive(f"max_{unit}", int(last))
        self.begin = positive("val_begin", begin)
        self.intervals = [(0, positive("val_interval", interval))]
        for pair in dynamic or ():
            if len(pair) != 2:
                raise ValueError(
                    f"dynamic_intervals must hold [milestone, interval] pairs, got {pair!r}"
                )
            milestone = positive("a milestone of dynamic_intervals", pair[0])
            if milestone <= self.intervals[-1][0]:
                raise ValueError(f"the milestones of dynamic_intervals must ascend: {dynamic!r}")
            self.intervals.append((milestone, positive("an interval", pair[1])))

    def due(self, done: int) -> bool:
        interval = [each for milestone, each in self.intervals if milestone <= done + 1][-1]
        return done >= self.begin and (done % interval == 0 or done == self.last)


def positive(name: str, value: int) -> int:
    """Return `value` if it is a whole number >= 1, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def updates_done(batch: int, length: int, window: int) -> int:
    """Return how many windows are complete after `batch` of a pass's batches, which ends one."""
    return -(-batch // window) if batch >= length else batch // window


def members_of(optim_wrapper: Any) -> list[Any]:
    """Return the optimizer wrappers of a group, or the only one."""
    is_group = isinstance(optim_wrapper, Mapping)
    return list(optim_wrapper.values()) if is_group else [optim_wrapper]


def windows_of(optim_wrapper: Any) -> list[int]:
    return [getattr(one, "_accumulative_counts", 1) for one in members_of(optim_wrapper)]


def window_of(optim_wrapper: Any) -> int | None:
    """Return the batches per update; None where members of a group differ."""
    windows = set(windows_of(optim_wrapper))
    return windows.pop() if len(windows) == 1 else None


def is_weighted(optim_wrapper: Any) -> bool:
    """Say whether losses are weighted by what they are means over; then windows end with a pass."""
    return getattr(optim_wrapper, "loss_weight", None) is not None


def step_of(model: Any, optim_wrapper: Any) -> Callable[[Any, Any], Any]:
    """Return the training step; where windows accumulate, one that has to count its batch.

    Else a window would hold other batches than its losses are divided by. An optimizer of a group
    may count none.
    """
    train_step: Callable[[Any, Any], Any] = model.train_step
    is_group = isinstance(optim_wrapper, Mapping)
    if not hasattr(optim_wrapper, "begin_batch" if is_group else "inner_count"):
        return train_step
    longest = max(windows_of(optim_wrapper), default=1)
    if not is_group and longest == 1:
        return train_step

    def counted_step(data: Any, optim_wrapper: Any) -> Any:
        if is_group:
            optim_wrapper.begin_batch()
        before = sum(one.inner_count for one in members_of(optim_wrapper))
        logs = train_step(data, optim_wrapper)
        count = sum(one.inner_count for one in members_of(optim_wrapper)) - before
        if longest > 1 and (count < 1 or (count > 1 and not is_group)):
            raise RuntimeError(
                f"{type(model).__name__}.train_step counted {count} micro-batches for one batch, "
                f"which accumulative_counts={longest} does not allow: do one "
                "update_params(loss), or one backward(scale_loss(loss)) and, where "
                "should_update(), step() and zero_grad(). To leave an update out, leave out its "
                "step() alone"
            )
        return logs

    return counted_step


def holds_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def start_counting(
    optim_wrapper: Any, model: nn.Module, iteration: int, max_iterations: int
) -> None:
    """Tell the optimizer wrapper where training starts and ends, in batches.

    Inside an accumulation window, whose gradients come from a checkpoint, it counts from the
    window's first batch, so that the losses still to come weigh as if there had been no
    interruption.
    """
    if not holds_gradients(model):
        optim_wrapper.initialize_count_status(model, iteration, max_iterations)
        return
    followers = getattr(optim_wrapper, "followers", lambda: [optim_wrapper])
    for member in followers():
        # Our own wrappers save their count, others may not.
        count = member._inner_count or iteration
        start = count - count % member._accumulative_counts
        member.initialize_count_status(model, start, max_iterations)
        member._inner_count = count
