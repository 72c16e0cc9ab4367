"""When to validate, and how many batches and updates a run has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn


class ValSchedule:
    """After which finished units (epochs or updates) a validation is due.

    Args:
        unit: What is counted, for the texts: "epochs" or "steps".
        last: The run's last unit, after which a validation is due anyway.
        begin: The first unit after which one may be due.
        interval: Units between two validations.
        dynamic: (milestone, interval) pairs: from unit `milestone` on, another interval.

    Raises:
        AssertionError: `last` is not a whole number.
        ValueError: A number is not positive, or the milestones do not ascend.
    """

    def __init__(
        self,
        unit: str,
        last: int,
        *,
        begin: int = 1,
        interval: int = 1,
        dynamic: Sequence[tuple[int, int]] | None = None,
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
        """Say whether a validation is due after `done` finished units."""
        coming = done + 1
        interval = [each for milestone, each in self.intervals if milestone <= coming][-1]
        return done >= self.begin and (done % interval == 0 or done == self.last)


def positive(name: str, value: int) -> int:
    """Return `value` if it is a whole number >= 1, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def window_of(optim_wrapper: Any) -> int | None:
    """Return the batches per update; None where members of a group differ."""
    windows = {getattr(member, "_accumulative_counts", 1) for member in members_of(optim_wrapper)}
    return windows.pop() if len(windows) == 1 else None


def step_of(model: Any, optim_wrapper: Any) -> Callable[[Any, Any], Any]:
    """Return the training step; where windows accumulate, one that has to count its batch.

    Else a window would hold other batches than its losses are divided by, and a
    resume would not know its place in it. An optimizer of a group may count none.
    """
    train_step: Callable[[Any, Any], Any] = model.train_step
    is_group = isinstance(optim_wrapper, Mapping)
    if not hasattr(optim_wrapper, "begin_batch" if is_group else "inner_count"):
        return train_step
    windows = [getattr(one, "_accumulative_counts", 1) for one in members_of(optim_wrapper)]
    accumulates = max(windows, default=1) > 1
    if not is_group and not accumulates:
        return train_step

    def counted_step(data: Any, optim_wrapper: Any) -> Any:
        if is_group:
            optim_wrapper.begin_batch()
        before = _counts_of(optim_wrapper)
        logs = train_step(data, optim_wrapper)
        count = _counts_of(optim_wrapper) - before
        if accumulates and (count < 1 or (count > 1 and not is_group)):
            raise RuntimeError(
                f"{type(model).__name__}.train_step counted {count} micro-batches for one batch, "
                f"which accumulative_counts={max(windows)} does not allow: do one "
                "update_params(loss), or one backward(scale_loss(loss)) and, where "
                "should_update(), step() and zero_grad(). To leave an update out, leave out its "
                "step() alone"
            )
        return logs

    return counted_step


def _counts_of(optim_wrapper: Any) -> int:
    return sum(one.inner_count for one in members_of(optim_wrapper))


def updates_between(done: int, last: int, window: int) -> int:
    """Return the updates from batch `done` to batch `last`, which ends a window itself."""
    return last // window - done // window + (1 if last % window else 0)


def holds_gradients(model: nn.Module) -> bool:
    """Say whether there are gradients of an unfinished accumulation window."""
    return any(parameter.grad is not None for parameter in model.parameters())


def start_counting(
    optim_wrapper: Any, model: nn.Module, iteration: int, max_iterations: int
) -> None:
    """Tell the optimizer wrapper where training starts and ends, in batches.

    A run that goes on inside an accumulation window has that window's gradients
    back from its checkpoint: it counts from the window's first batch, so that
    the losses still to come weigh as if there had been no interruption.
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


def members_of(optim_wrapper: Any) -> Iterator[Any]:
    """Yield the optimizer wrappers of a group, or the only one."""
    if isinstance(optim_wrapper, Mapping):
        yield from optim_wrapper.values()
    else:
        yield optim_wrapper
