"""Check arguments that are numbers, before anything is started or sent."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, *, minimum: int = 1) -> int:
    """Return a count as an int.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below ``minimum``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return operator.index(value)


def seconds(name: str, value: Any) -> float | None:
    """Return a duration as a float; None stays None.

    Raises:
        TypeError: it is neither a number nor None.
        ValueError: it is NaN.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r}")
    duration = float(value)
    if duration != duration:
        raise ValueError(f"{name} must be a number of seconds or None, got {value!r}")
    return duration
