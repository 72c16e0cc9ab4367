"""Wrap the training step: detached and weighted logs, and counts of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..wrappers.steps.buffers import uncounted_batch
from ..wrappers.steps.step import ModelWrapper, detached
from .logs import WeightedLogs
from .schedule import get_members, get_windows, is_weighted
from .state import LoopState

Step: TypeAlias = Callable[[Any, Any], Any]


def get_step(state: LoopState) -> Step:
    """Return the model's training step, with checked counts and weighted logs where needed."""
    wrapper: Any = state.model
    step: Step = wrapper.train_step
    if getattr(step, "__func__", None) is not ModelWrapper.train_step:
        step = _detached(step)
    optim = state.optim_wrapper
    is_group = isinstance(optim, Mapping)
    longest = max(get_windows(optim), default=1)
    # The optimizer wrappers of mmengine do not count micro-batches in this way.
    counts = hasattr(optim, "begin_batch" if is_group else "inner_count")
    if counts and (is_group or longest > 1):
        step = _counted(step, type(wrapper).__name__, longest, is_group)
    return _weighted(step, wrapper) if is_weighted(optim) else step


def _detached(step: Step) -> Step:
    """Return a step whose logs do not change after it."""

    def detached_step(data: Any, optim_wrapper: Any) -> Any:
        logs = step(data, optim_wrapper)
        return detached(logs) if isinstance(logs, Mapping) else logs

    return detached_step


def _counted(step: Step, name: str, longest: int, is_group: bool) -> Step:
    """Return a step that raises unless ``step`` counts each batch as one micro-batch.

    With another count the losses would be divided by a wrong number. In a group of optimizers, at
    least one of them must count the batch.
    """

    def counted_step(data: Any, optim_wrapper: Any) -> Any:
        if is_group:
            optim_wrapper.begin_batch()
        before = sum(member.inner_count for member in get_members(optim_wrapper))
        logs = step(data, optim_wrapper)
        count = sum(member.inner_count for member in get_members(optim_wrapper)) - before
        if longest > 1 and (count < 1 or (count > 1 and not is_group)):
            raise RuntimeError(
                f"with accumulative_counts={longest} a training step must count one micro-batch "
                f"per batch, but {name}.train_step counted {count}: call update_params(loss) once, "
                "or backward(scale_loss(loss)) once and, if should_update(), step() and "
                "zero_grad(). To skip an update, skip only its step()"
            )
        return logs

    return counted_step


def _weighted(step: Step, wrapper: Any) -> Step:
    """Return a step whose logs carry the weight of the batch's loss; 0 if it does not count."""

    def weighted_step(data: Any, optim_wrapper: Any) -> Any:
        if optim_wrapper.batch_counts:
            logs = step(data, optim_wrapper)
        else:
            with uncounted_batch(wrapper, optim_wrapper):
                logs = step(data, optim_wrapper)
        weight = optim_wrapper.last_weight
        return logs if weight is None else WeightedLogs(logs, weight)

    return weighted_step
