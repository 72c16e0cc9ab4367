"""A log record or an evaluation as one line of text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from ..state import LoopState

# Told in words of their own at the end of the line.
_SPEED_KEYS = ("samples_per_s", "steps_per_s", "data_share")
_DATA_SHARE_SHOWN = 0.1


def train_line(state: LoopState, record: Mapping[str, float]) -> str:
    """`epoch 2/10 step 150/500 loss 0.123 lr 0.001 1234 samples/s eta 0:01:20`."""
    return " ".join(
        [epoch_text(state), step_text(state), values_text(record), *_speed(state, record)]
    )


def eval_line(state: LoopState, metrics: Mapping[str, float]) -> str:
    """`val epoch 2/10 step 150/500 accuracy 0.97`."""
    values = values_text(metrics) or ("cut short" if state.stop_reason else "no metrics")
    return " ".join([state.phase.value, epoch_text(state), step_text(state), values])


def epoch_text(state: LoopState) -> str:
    """`epoch 2/10`, counting the running epoch as one."""
    total = "" if state.max_epochs is None else f"/{state.max_epochs}"
    return f"epoch {state.running_epoch}{total}"


def step_text(state: LoopState) -> str:
    """`step 150/500`, in optimizer updates."""
    total = "" if state.max_steps is None else f"/{state.max_steps}"
    return f"step {state.step}{total}"


def values_text(values: Mapping[str, float]) -> str:
    """`loss 0.123 lr 0.001`: four digits each, the figures of speed left out.

    Of several learning rates (`lr/0`, `lr/1`, ...) only the highest is shown, as `lr`.
    """
    shown: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith("lr/"):
            shown["lr"] = max(value, shown.get("lr", value))
        elif name not in _SPEED_KEYS:
            shown[name] = value
    return " ".join(f"{name} {value:.4g}" for name, value in shown.items())


def count_text(value: float) -> str:
    """`0.1235`, `123.5`, `12346`: four digits, but no power of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _speed(state: LoopState, record: Mapping[str, float]) -> list[str]:
    words = []
    if "samples_per_s" in record:
        words.append(f"{count_text(record['samples_per_s'])} samples/s")
    if record.get("data_share", 0.0) > _DATA_SHARE_SHOWN:
        words.append(f"({record['data_share']:.0%} waiting for data)")
    steps_per_s = record.get("steps_per_s", 0.0)
    if state.max_steps is not None and steps_per_s > 0:
        left_s = round(max(0, state.max_steps - state.step) / steps_per_s)
        words.append(f"eta {timedelta(seconds=left_s)}")
    return words
