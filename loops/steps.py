"""Wrap the training step: weighted logs, micro-batch counts, blocks of compiled steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..collectives import get_rank
from ..wrappers.features import model_features
from .hook import Hook, HookList
from .schedule import get_members, get_window, get_windows, is_weighted
from .state import LoopState, WeightedLogs

logger = logging.getLogger(__name__)

Step: TypeAlias = Callable[[Any, Any], Any]

_AT_EACH_STEP = ("on_batch_start", "on_batch_end", "on_update", "on_save_point")


def get_step(state: LoopState) -> Step:
    """Return the model's training step, with checked counts and weighted logs where needed."""
    wrapper: Any = state.model
    step: Step = wrapper.train_step
    optim = state.optim_wrapper
    is_group = isinstance(optim, Mapping)
    longest = max(get_windows(optim), default=1)
    # The optimizer wrappers of mmengine do not count micro-batches in this way.
    counts = hasattr(optim, "begin_batch" if is_group else "inner_count")
    if counts and (is_group or longest > 1):
        step = _counted(step, type(wrapper).__name__, longest, is_group)
    return _weighted(step) if is_weighted(optim) else step


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


def _weighted(step: Step) -> Step:
    """Return a step whose logs carry the weight of the batch's loss."""

    def weighted_step(data: Any, optim_wrapper: Any) -> Any:
        logs, weight = step(data, optim_wrapper), optim_wrapper.last_weight
        return logs if weight is None else WeightedLogs(logs, weight)

    return weighted_step


class StepBlocks(Hook):
    """Check the model of a compiled step for changes only once per block of steps.

    A block has at most ``steps`` steps. It ends early at a log record, a validation or the end of a
    pass.
    """

    # Called after all other hooks, so that the next check finds their changes.
    order = 100

    def __init__(self, state: LoopState, steps: int) -> None:
        self._steps = steps
        self._recheck_every = model_features(state.model).recheck_every

    def on_epoch_start(self, state: LoopState) -> None:
        self._recheck_every(self._steps)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._recheck_every(self._steps)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._recheck_every(self._steps)

    def on_save_point(self, state: LoopState) -> None:
        if not state.batch:
            self._recheck_every(self._steps)

    def on_train_end(self, state: LoopState) -> None:
        self._recheck_every(1)

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._recheck_every(1)


def combine_blocks(hooks: HookList, state: LoopState, steps_per_call: int) -> HookList:
    """Add ``StepBlocks`` to the hooks; if it would have no effect, log a warning instead."""
    if steps_per_call == 1:
        return hooks
    reason = _obstacle_to_blocks(state, hooks)
    if not reason:
        return HookList([*hooks, StepBlocks(state, steps_per_call)])
    if get_rank() == 0:
        logger.warning("steps_per_call: %d has no effect: %s", steps_per_call, reason)
    return hooks


def _obstacle_to_blocks(state: LoopState, hooks: HookList) -> str:
    if not model_features(state.model).recheck_every(1):
        return "the training step is not compiled (compile: step)"
    if get_window(state.optim_wrapper) != 1:
        return "an update takes several batches (accumulative_counts)"
    listeners = (listener for event in _AT_EACH_STEP for listener in getattr(hooks, event))
    ours = __name__.split(".")[0]
    for owner in (type(getattr(listener, "__self__", listener)) for listener in listeners):
        if owner.__module__.split(".")[0] != ours:
            return f"{owner.__name__} acts at each step and may change the model"
    return ""
