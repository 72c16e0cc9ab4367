"""End training after a number of seconds."""

from __future__ import annotations

from ...registry import HOOKS
from ..hook import Hook
from ..state import LoopState


@HOOKS.register_module()
class TimeLimitHook(Hook):
    """End training after a number of seconds, with a checkpoint as at a regular end.

    The time is ``state.clock_s``, which is equal on all ranks and updated about once per second. It
    includes evaluations, and the time before a resume.

    Args:
        max_seconds: seconds of training, more than 0.

    Raises:
        ValueError: ``max_seconds`` is not more than 0.
    """

    def __init__(self, *, max_seconds: float) -> None:
        if not max_seconds > 0:
            raise ValueError(f"max_seconds must be more than 0, got {max_seconds!r}")
        self._max_s = max_seconds

    def on_update(self, state: LoopState) -> None:
        if state.together and state.clock_s >= self._max_s:
            state.request_stop(f"max_seconds is {self._max_s:g}")
