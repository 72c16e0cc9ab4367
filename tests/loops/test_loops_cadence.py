"""When a recurring action is due."""

from __future__ import annotations

from typing import Any

import pytest
from loop_parts import make_state

from stepwrap.loops import Cadence


def due_steps(cadence: Cadence, steps: range) -> list[int]:
    """Return the updates at which the action is due; an update takes 4 s."""
    state = make_state()
    due = []
    for step in steps:
        state.step, state.clock_s = step, 100.0 + 4 * step
        due += [step] if cadence.due_step(state) else []
    return due


def test_by_updates_epochs_and_seconds() -> None:
    cadence, state = Cadence(every_steps=3, every_epochs=2, every_secs=10), make_state()
    # The clock is first read at update 0, at 100 s; the action is due 10 s after each time.
    assert due_steps(cadence, range(8)) == [3, 6]
    due_epochs = []
    for state.epoch in range(5):
        due_epochs += [state.epoch] if cadence.due_epoch(state) else []
    assert due_epochs == [2, 4]
    state.batch = 1
    assert not cadence.due_epoch(state)


def test_by_seconds_alone() -> None:
    assert due_steps(Cadence(every_secs=10), range(1, 9)) == [4, 7]


def test_nothing_given_is_never_due() -> None:
    state = make_state()
    state.step, state.epoch, state.clock_s = 1, 1, 1e9
    assert not Cadence().due_step(state)
    assert not Cadence().due_epoch(state)


@pytest.mark.parametrize(
    "bad", [{"every_steps": 0}, {"every_steps": 1.5}, {"every_epochs": True}, {"every_secs": 0}]
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cadence(**bad)
