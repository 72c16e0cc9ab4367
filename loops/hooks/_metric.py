"""Picking the one metric that a hook watches, and comparing its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ...registry import nearest

Mode = Literal["min", "max"]


def check_mode(mode: str, *, setting: str) -> Mode:
    """Return `mode` if it is "min" or "max", else raise ValueError naming the setting."""
    if mode == "min":
        return "min"
    if mode == "max":
        return "max"
    raise ValueError(f"{setting} must be 'min' or 'max', got {mode!r}")


def pick_metric(metrics: Mapping[str, float], name: str, *, setting: str) -> float:
    """Return `metrics[name]`; a name that does not exist is answered with those that do.

    Raises:
        ValueError: no evaluation produced `name`; the text lists what it did produce.
    """
    if name in metrics:
        return metrics[name]
    near = nearest(name, metrics)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(metrics)) or "none at all"
    raise ValueError(
        f"{setting} must name a metric of the evaluation, got {name!r}; "
        f"the last evaluation gave: {known}{guess}"
    )


def is_better(value: float, best: float | None, mode: Mode, *, min_delta: float = 0.0) -> bool:
    """Say whether `value` beats `best` by more than `min_delta`; NaN never does."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best + min_delta if mode == "max" else value < best - min_delta
