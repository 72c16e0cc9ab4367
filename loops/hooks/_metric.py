"""The one metric that a hook watches: its value, and which values are better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from ...collectives import get_rank
from ...registry import nearest
from ..metrics import direction_of
from ..state import LoopState

logger = logging.getLogger(__name__)


class WatchedMetric:
    """A metric of the validation and the direction in which it improves.

    Args:
        name: Its name among the results.
        mode: "max" when higher values are better, "min" when lower; None to ask the metric.
        setting: The hook and its argument, for errors: "CheckpointHook: keep_best".

    Raises:
        ValueError: There is no such mode.
    """

    def __init__(self, name: str, mode: str | None, *, setting: str) -> None:
        self._hook = setting.partition(":")[0]
        if mode not in ("min", "max", None):
            raise ValueError(f"{self._hook}: mode must be 'min' or 'max', got {mode!r}")
        self.name = name
        self._setting = setting
        self._mode = mode

    def start(self, state: LoopState) -> None:
        """Learn the direction before training, where there is such a metric, and tell it.

        Raises:
            ValueError: Neither `mode` nor the metric tells it.
        """
        if self.name.partition("/")[0] not in state.higher_is_better:
            return
        asked = self._mode is None
        extreme = self.extreme(state)
        if asked and get_rank() == 0:
            logger.info("%s: the best %s is the %s", self._hook, self.name, extreme)

    def extreme(self, state: LoopState) -> str:
        """Return "lowest" or "highest": which value is the best.

        Raises:
            ValueError: Neither `mode` nor the metric tells it.
        """
        if self._mode is None:
            higher = direction_of(self.name, state.higher_is_better)
            if higher is None:
                raise ValueError(
                    f"{self._hook}: mode must be given, 'max' when higher values of {self.name!r} "
                    "are better, 'min' when lower: neither the metric, by higher_is_better, nor "
                    "its name tells"
                )
            self._mode = "max" if higher else "min"
        return "highest" if self._mode == "max" else "lowest"

    def warn_unless(self, mode: str, state: LoopState) -> None:
        """Warn where the metric tells another direction than `mode`."""
        higher = direction_of(self.name, state.higher_is_better)
        if higher is not None and higher != (mode == "max") and get_rank() == 0:
            better = "higher" if higher else "lower"
            logger.warning(
                "%s: mode is %r, but %s values of %r are better",
                self._hook,
                mode,
                better,
                self.name,
            )

    def value_in(self, metrics: Mapping[str, float]) -> float:
        """Return its value; a name that does not exist is answered with those that do.

        Raises:
            ValueError: No evaluation produced it; the text lists what it did produce.
        """
        if self.name in metrics:
            return metrics[self.name]
        near = nearest(self.name, metrics)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(metrics)) or "none at all"
        raise ValueError(
            f"{self._setting} must name a metric of the evaluation, got {self.name!r}; "
            f"the last evaluation gave: {known}{guess}"
        )

    def improves(
        self, value: float, best: float | None, state: LoopState, *, min_delta: float = 0.0
    ) -> bool:
        """Say whether `value` beats `best` by more than `min_delta`; NaN never does."""
        rising = self.extreme(state) == "highest"
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best + min_delta if rising else value < best - min_delta
