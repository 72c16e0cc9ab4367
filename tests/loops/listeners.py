"""Small hooks for the tests of the loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stepwrap.loops import Hook, LoopState


def on(order: int = 50, **listeners: Callable[..., object]) -> Any:
    """Return a hook that calls each function at the event with its name."""
    return SimpleNamespace(order=order, **listeners)


def stop_at(step: int | None) -> Any:
    """Return a hook that requests a stop after an update."""

    def on_update(state: LoopState) -> None:
        if state.step == step:
            state.request_stop("enough")

    return on(on_update=on_update)


def failing(error: BaseException, event: str = "on_update", *, step: int | None = None) -> Any:
    """Return a hook that raises at an event, always or at one step only."""

    def fail(state: LoopState, *_: object) -> None:
        if step in (None, state.step):
            raise error

    return on(**{event: fail})


def slow(seconds: float, event: str = "on_update") -> Any:
    """Return a hook that sleeps at each event of one kind."""
    return on(**{event: lambda *_: time.sleep(seconds)})


class Records(Hook):
    """Collect the log records and the results of evaluations."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.steps: list[int] = []
        self.evaluated: list[dict[str, float]] = []

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self.records.append(dict(record))
        self.steps.append(state.step)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        self.evaluated.append(dict(metrics))
