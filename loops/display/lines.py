"""Log records, evaluations and the remaining time as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter

from ..state import LoopState

# These values are formatted separately, at the end of the line.
_SPEED_KEYS = (
    *("samples_per_s", "tokens_per_s", "mfu", "steps_per_s", "data_share", "hooks_share"),
    *("rank_wait_share", "slowest_rank"),
)
_DATA_SHARE_SHOWN = 0.1
# Time constant: after this many seconds, a step's weight in the estimate has fallen to 1/e.
_MEMORY_S = 30.0


def train_line(state: LoopState, record: Mapping[str, float]) -> str:
    """Return ``epoch 2/10 step 150/500 loss 0.123 lr 0.001 1234 samples/s eta 0:01:20``."""
    return " ".join(
        [epoch_text(state), step_text(state), values_text(record), *_speed(state, record)]
    )


def eval_line(state: LoopState, metrics: Mapping[str, float]) -> str:
    """Return ``val epoch 2/10 step 150/500 accuracy 0.97``."""
    values = values_text(metrics) or ("cut short" if state.stop_reason else "done")
    return " ".join([state.phase.value, epoch_text(state), step_text(state), values])


def epoch_text(state: LoopState) -> str:
    """Return ``epoch 2/10``; the running epoch counts."""
    total = "" if state.max_epochs is None else f"/{state.max_epochs}"
    return f"epoch {state.running_epoch}{total}"


def step_text(state: LoopState) -> str:
    """Return ``step 150/500``, in optimizer updates."""
    total = "" if state.max_steps is None else f"/{state.max_steps}"
    return f"step {state.step}{total}"


def values_text(values: Mapping[str, float], separator: str = " ") -> str:
    """Return ``loss 0.123 lr 0.001``, without speeds and with only the highest learning rate."""
    shown: dict[str, float] = {}
    for name, value in values.items():
        if name == "lr" or name.startswith("lr/"):
            shown["lr"] = max(value, shown.get("lr", value))
        elif name not in _SPEED_KEYS:
            shown[name] = value
    return separator.join(f"{name} {value:.4g}" for name, value in shown.items())


def rates_text(record: Mapping[str, float]) -> list[str]:
    """Return ``1234 samples/s``, ``12345 tokens/s``, ``41% MFU`` if known, without exponents."""
    rates = [(name, record.get(f"{name}_per_s")) for name in ("samples", "tokens")]
    available = [(name, rate) for name, rate in rates if rate is not None]
    words = [f"{rate:{'.0f' if rate >= 1000 else '.4g'}} {name}/s" for name, rate in available]
    return [*words, f"{record['mfu']:.0%} MFU"] if "mfu" in record else words


def _speed(state: LoopState, record: Mapping[str, float]) -> list[str]:
    words = rates_text(record)
    if record.get("data_share", 0.0) > _DATA_SHARE_SHOWN:
        words.append(f"({record['data_share']:.0%} waiting for data)")
    steps_per_s = record.get("steps_per_s", 0.0)
    if state.max_steps is not None and steps_per_s > 0:
        left_s = round(max(0, state.max_steps - state.step) / steps_per_s)
        words.append(f"eta {timedelta(seconds=left_s)}")
    return words


class TimeLeft:
    """Estimate the remaining time of the training from its recent speed.

    After the first evaluation the estimate includes the later ones, as if all of them took as long
    as the last one and were equally far apart.
    """

    def __init__(self, step: int) -> None:
        self._step = self._eval_step = step
        self._since_s = perf_counter()
        self._steps = self._seconds = 0.0
        self._eval_interval, self._eval_s = 0, 0.0

    def update(self, state: LoopState) -> None:
        """Count the time since the last call for the steps since then."""
        if state.step > self._step:
            now = perf_counter()
            elapsed_s = now - self._since_s
            decay = math.exp(-elapsed_s / _MEMORY_S)
            self._steps = self._steps * decay + state.step - self._step
            self._seconds = self._seconds * decay + elapsed_s
            self._step, self._since_s = state.step, now

    def count_eval(self, state: LoopState, seconds: float) -> None:
        """Count an evaluation that has just ended; its time does not count for the steps."""
        self._since_s = perf_counter()
        self._eval_interval, self._eval_s = state.step - self._eval_step, seconds
        self._eval_step = state.step

    def speed_text(self) -> str:
        """Return ``12.3 steps/s``; empty before the first step."""
        return f"{self._steps / self._seconds:.3g} steps/s" if self._seconds else ""

    def text(self, state: LoopState) -> str:
        """Return ``eta 0:01:20``; empty before the first step, or without a known end."""
        if state.max_steps is None or not self._steps:
            return ""
        left_s = (state.max_steps - state.step) * self._seconds / self._steps
        if self._eval_interval:
            evals = math.ceil((state.max_steps - self._eval_step) / self._eval_interval)
            left_s += evals * self._eval_s
        return f"eta {timedelta(seconds=round(max(0.0, left_s)))}"
