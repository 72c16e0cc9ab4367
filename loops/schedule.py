"""When validations and saves are due, and the number of batches and updates of a run."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..collectives import get_rank
from ..wrappers.features import OptimFeatures, optim_features
from ..wrappers.layout import drop_unreduced_gradients
from .state import LoopState

logger = logging.getLogger(__name__)


class Cadence:
    """Decide when an action is due, by intervals in updates, epochs or seconds of training.

    Any of the intervals may be given; None turns one off. Call ``due_step`` after each update and
    ``due_epoch`` after each epoch, usually in ``on_save_point``. The result is the same on every
    rank.

    Raises:
        ValueError: a number is not positive, or a count is not whole.
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
        # Compared with `state.clock_s`; set by the first call of `due_step`.
        self.due_at_s = math.inf if every_secs is None else -math.inf

    def due_step(self, state: LoopState) -> bool:
        """Return whether the action is due after this update, by its number or by the clock."""
        by_steps = self.every_steps is not None and state.step % self.every_steps == 0
        by_clock = state.clock_s >= self.due_at_s and self._due_by_clock(state)
        return state.step > 0 and (by_steps or by_clock)

    def due_epoch(self, state: LoopState) -> bool:
        """Return whether an epoch has just ended (``state.batch`` is 0) and the action is due."""
        if self.every_epochs is None or state.batch or not state.epoch:
            return False
        return state.epoch % self.every_epochs == 0

    def _due_by_clock(self, state: LoopState) -> bool:
        assert self.every_secs is not None
        is_start = self.due_at_s == -math.inf
        self.due_at_s = state.clock_s + self.every_secs
        return not is_start


class Budget(ABC):
    """The length of a training run and the times of its validations, in epochs or in steps.

    The first validation is after ``begin``, the others at multiples of the interval and after the
    last epoch or step, unless ``begin`` is greater. Each interval of ``dynamic`` applies from its
    milestone on.
    """

    unit: ClassVar[str]

    def __init__(
        self,
        last: int,
        begin: int | None,
        interval: int,
        dynamic: Sequence[tuple[int, int]] | None,
    ) -> None:
        if isinstance(last, bool) or int(last) != last:
            raise AssertionError(f"max_{self.unit} must be a whole number, got {last!r}")
        self.last = positive(f"max_{self.unit}", int(last))
        # None: after the first interval. This is never the number of epochs or steps done.
        self.begin = -1 if begin is None else positive("val_begin", begin, least=0)
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

    @abstractmethod
    def done(self, state: LoopState) -> int:
        """Return the number of finished epochs or steps."""

    def plan(self, state: LoopState, length: int | None, *, is_exact: bool = True) -> int:
        """Set the run's length in ``state`` in epochs, updates and batches, as far as it is known.

        Returns the value that ``state.iteration`` will have at the end of the run; -1 if it is not
        certain.

        Args:
            state: the state; its counters give the position in the run.
            length: batches in a pass; None if unknown.
            is_exact: whether ``length`` is certain, not an estimate.
        """
        last = self._plan(state, length, is_exact=is_exact)
        state.max_iterations = None if last < 0 else last
        return last

    @abstractmethod
    def _plan(self, state: LoopState, length: int | None, *, is_exact: bool) -> int:
        """Set ``max_epochs`` and ``max_steps``, and return the same as ``plan``."""

    @abstractmethod
    def forget_length(self, state: LoopState) -> None:
        """Set the limits in ``state`` that depend on the length of a pass to None."""

    def val_due(self, state: LoopState) -> bool:
        """Return whether a validation is due.

        Returns False after a stop: the resumed run validates instead.
        """
        done = self.done(state)
        interval = [
            step_interval for milestone, step_interval in self.intervals if milestone <= done + 1
        ][-1]
        is_regular = done > max(self.begin, 0) and (done % interval == 0 or done == self.last)
        return (is_regular or done == self.begin) and not state.stop_reason

    def continues(self, state: LoopState) -> bool:
        """Return whether there is more to train."""
        return self.done(state) < self.last and not state.stop_reason


class EpochBudget(Budget):
    """Passes over the data."""

    unit = "epochs"

    def done(self, state: LoopState) -> int:
        return state.epoch

    def val_due(self, state: LoopState) -> bool:
        return not state.batch and super().val_due(state)

    def _plan(self, state: LoopState, length: int | None, *, is_exact: bool) -> int:
        state.max_epochs, state.max_steps = self.last, None
        window, weighted = get_window(state.optim_wrapper), is_weighted(state.optim_wrapper)
        if length is None:
            return -1
        epochs = max(0, self.last - state.epoch)
        last = state.iteration + max(0, epochs * length - state.batch)
        if window is not None and weighted:
            done = _updates_done(state.batch, length, window)
            state.max_steps = state.step + max(0, epochs * -(-length // window) - done)
        elif window is not None:
            # The last window may have fewer batches.
            state.max_steps = state.step - (-last // window) - state.iteration // window
        return last if is_exact else -1

    def forget_length(self, state: LoopState) -> None:
        state.max_steps = None


class StepBudget(Budget):
    """Optimizer updates, in as many passes over the data as they need."""

    unit = "steps"

    def done(self, state: LoopState) -> int:
        return state.step

    def _plan(self, state: LoopState, length: int | None, *, is_exact: bool) -> int:
        state.max_steps = self.last
        window, updates_left = get_window(state.optim_wrapper), self.last - state.step
        if window is None:
            return -1
        if not is_weighted(state.optim_wrapper):
            last = (state.iteration // window + updates_left) * window
            if length is not None:
                batches = state.batch + last - state.iteration
                state.max_epochs = state.epoch + -(-batches // length)
            return last
        if length is None:
            return -1
        updates = _updates_done(state.batch, length, window) + updates_left
        passes, begun = divmod(updates, -(-length // window))
        state.max_epochs = state.epoch + passes + (begun > 0)
        last = state.iteration - state.batch + passes * length + begun * window
        return last if is_exact else -1

    def forget_length(self, state: LoopState) -> None:
        state.max_epochs = None


def positive(name: str, value: int, *, least: int = 1) -> int:
    """Return ``value`` if it is a whole number >= ``least``, otherwise raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return value


def _updates_done(batch: int, length: int, window: int) -> int:
    """Return the number of complete accumulation windows after ``batch`` batches of a pass.

    At the end of the pass a shorter last window counts too.
    """
    return -(-batch // window) if batch >= length else batch // window


def get_members(optim_wrapper: Any) -> list[Any]:
    """Return the optimizer wrappers of a group, or the only one."""
    is_group = isinstance(optim_wrapper, Mapping)
    return list(optim_wrapper.values()) if is_group else [optim_wrapper]


def get_windows(optim_wrapper: Any) -> list[int]:
    return [optim_features(member).accumulative_counts for member in get_members(optim_wrapper)]


def pop_empty_updates(optim_wrapper: Any) -> dict[str, float]:
    """Return the updates without gradients since the last call, for the log; only if there are any.

    With several optimizers, each of them has its own entry.
    """
    is_group = isinstance(optim_wrapper, Mapping)
    members = optim_wrapper if is_group else {"": optim_wrapper}
    counts: dict[str, float] = {}
    for name, member in members.items():
        if count := optim_features(member).pop_empty_updates():
            counts[f"updates_without_gradients/{name}".removesuffix("/")] = float(count)
    return counts


def get_window(optim_wrapper: Any) -> int | None:
    """Return the number of batches per update; None if the optimizers of a group differ."""
    windows = set(get_windows(optim_wrapper))
    return windows.pop() if len(windows) == 1 else None


def is_weighted(optim_wrapper: Any) -> bool:
    """Return whether the optimizer wrapper has a ``loss_weight``.

    If so, accumulation windows end with the pass and do not continue into the next one.
    """
    return optim_features(optim_wrapper).loss_weight is not None


def has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def start_counting(
    optim_wrapper: Any,
    model: nn.Module,
    iteration: int,
    max_iterations: int,
    *,
    by_updates: bool = False,
) -> None:
    """Set the first and the last batch that the optimizer wrapper counts.

    If a checkpoint restored gradients of an unfinished accumulation window, counting starts at the
    window's first batch, so that the remaining losses are scaled as without the interruption.

    Args:
        optim_wrapper: one or several optimizer wrappers.
        model: the model wrapper.
        iteration: finished batches.
        max_iterations: batches of the whole training; -1 if unknown.
        by_updates: whether the training ends after a number of updates, not of batches.
    """
    for member in get_members(optim_wrapper):
        if isinstance(member, OptimFeatures):
            member.ends_by_updates = by_updates
    if not iteration and has_gradients(model):
        _drop_gradients(model)
    if has_gradients(model):
        optim_features(optim_wrapper).continue_window(model, iteration, max_iterations)
    else:
        optim_wrapper.initialize_count_status(model, iteration, max_iterations)


def _drop_gradients(model: nn.Module) -> None:
    """Drop gradients that were there before the first batch, and would enter the first update."""
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    drop_unreduced_gradients(model.parameters())
    if get_rank() == 0:
        logger.warning(
            "%d parameters (%s) had gradients before the first batch; they are dropped",
            *(len(names), ", ".join(names[:3])),
        )
