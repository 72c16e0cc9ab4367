"""What a call ends in, as text that travels between processes."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from stepwrap.collectives import trace_collectives

T = TypeVar("T")

# Where all collectives called from here say that they were called.
HERE = os.path.relpath(__file__)


def outcome(call: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return type and text of the error that the call raises, or two empty texts."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def outcome_text(call: Callable[..., object], *args: Any) -> str:
    """Return the same in one text, or "no error"."""
    kind, text = outcome(call, *args)
    return f"{kind}: {text}" if kind else "no error"


def traced(on: bool, scenario: Callable[..., T], *args: Any) -> T:
    """Return what the scenario returns, with tracing switched on or off around it."""
    trace_collectives(on)
    try:
        return scenario(*args)
    finally:
        trace_collectives(False)
