"""Fewer checks of a compiled training step."""

from __future__ import annotations

import logging
from typing import Any

from ...collectives import get_rank
from ...registry import HOOKS
from ...wrappers.features import model_features
from ..hook import Hook, Listener
from ..schedule import get_window, positive
from ..state import LoopState

logger = logging.getLogger(__name__)

_AT_EACH_STEP = ("on_batch_start", "on_batch_end", "on_update", "on_save_point")


@HOOKS.register_module()
class StepBlocksHook(Hook):
    """Check the model of a compiled step for changes only once per block of steps.

    A block ends early at a log record, a validation or the end of a pass. The results are the same
    as without this hook. It has no effect, and says so, if the step is not compiled, if an update
    takes several batches, or if a user-defined hook acts at each step and may change the model.

    Args:
        steps: the maximum number of steps in a block.

    Raises:
        ValueError: ``steps`` is not a whole number >= 1.
    """

    # Called after all other hooks, so that the next check finds their changes.
    order = 100

    def __init__(self, steps: int = 32) -> None:
        self._steps = positive("StepBlocksHook: steps", steps)
        self._is_on = False
        # The classes of user-defined hooks that act at each step.
        self._watchers: list[str] = []

    def around(self, event: str, hook: Any, listener: Listener) -> Listener:
        package = type(hook).__module__.partition(".")[0]
        if event in _AT_EACH_STEP and package != __name__.partition(".")[0]:
            self._watchers.append(type(hook).__name__)
        return listener

    def on_train_start(self, state: LoopState) -> None:
        reason = self._find_obstacle(state)
        self._is_on = self._steps > 1 and not reason
        if self._steps > 1 and reason and get_rank() == 0:
            logger.warning("StepBlocksHook has no effect: %s", reason)

    def on_epoch_start(self, state: LoopState) -> None:
        self._start_block(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._start_block(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self._start_block(state)

    def on_save_point(self, state: LoopState) -> None:
        if not state.batch:
            self._start_block(state)

    def on_train_end(self, state: LoopState) -> None:
        self._stop(state)

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._stop(state)

    def _start_block(self, state: LoopState) -> None:
        if self._is_on:
            model_features(state.model).recheck_every(self._steps)

    def _stop(self, state: LoopState) -> None:
        if self._is_on:
            self._is_on = False
            model_features(state.model).recheck_every(1)

    def _find_obstacle(self, state: LoopState) -> str:
        if not model_features(state.model).recheck_every(1):
            return "the training step is not compiled (compile: step)"
        if get_window(state.optim_wrapper) != 1:
            return "an update takes several batches (accumulative_counts)"
        if self._watchers:
            return f"{self._watchers[0]} acts at each step and may change the model"
        return ""
