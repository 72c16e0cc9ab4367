"""Stop training early: when the validation no longer improves, or after a time."""

from __future__ import annotations

from typing import Any

from ...registry import HOOKS
from ..hook import Hook
from ..metrics.evaluation import WatchedMetric
from ..schedule import positive
from ..state import LoopState, Phase


@HOOKS.register_module()
class EarlyStopHook(Hook):
    """Stop training after ``patience`` validations in a row without improvement.

    If a run that was stopped by this hook is resumed, it stops at once, unless ``patience`` was
    increased.

    Args:
        metric: the name of a validation metric.
        patience: the number of validations without improvement after which to stop.
        mode: "min" if lower values are better, "max" if higher ones are; default: by the
            metric's ``higher_is_better``, or by its name ("loss", "error", "accuracy").
        min_delta: only an improvement by more than this counts; NaN is never an improvement.

    Raises:
        ValueError: ``patience``, ``mode`` or ``min_delta`` is not allowed.
    """

    def __init__(
        self, metric: str, patience: int, *, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        if min_delta < 0:
            raise ValueError(f"min_delta must be at least 0, got {min_delta}")
        self.watched = WatchedMetric(metric, mode, setting="EarlyStopHook: metric")
        self._patience = positive("patience", patience)
        self._min_delta = min_delta
        self._best: float | None = None
        self._best_step = 0
        self._waited = 0

    def on_train_start(self, state: LoopState) -> None:
        self.watched.start(state)
        self._stop_if_due(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if state.phase is not Phase.VAL or (state.stop_reason and not metrics):
            return
        value = self.watched.value_in(metrics)
        if self.watched.improves(value, self._best, state, min_delta=self._min_delta):
            self._best, self._best_step, self._waited = value, state.step, 0
        else:
            self._waited += 1
            self._stop_if_due(state)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._waited = state["waited"]

    def _stop_if_due(self, state: LoopState) -> None:
        if self._waited < self._patience:
            return
        best = "was always NaN"
        if self._best is not None:
            best = f"was {self.watched.extreme(state)} at {self._best:.4g}"
        state.request_stop(
            f"{self.watched.name} {best} (step {self._best_step}) and has not improved "
            f"in {self._waited} validations (patience {self._patience})"
        )


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
