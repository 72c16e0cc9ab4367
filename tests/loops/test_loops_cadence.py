"""When something that happens every now and then is due."""

from __future__ import annotations

from typing import Any

import pytest
from loop_parts import make_state

from stepwrap.loops import Cadence


def test_by_updates_epochs_and_seconds() -> None:
    state = make_state()
    cadence = Cadence(every_steps=3, every_epochs=2, every_secs=10)
    due_steps = []
    for step in range(8):
        state.step, state.clock_s = step, 100.0 + 4 * step
        if cadence.due_step(state):
            due_steps.append(step)
    # The clock is first looked at at update 0, at 100 s, and again due 10 s after each time.
    assert due_steps == [3, 6]
    due_epochs = []
    for epoch in range(5):
        state.epoch = epoch
        if cadence.due_epoch(state):
            due_epochs.append(epoch)
    assert due_epochs == [2, 4]
    state.batch = 1
    assert not cadence.due_epoch(state)


def test_by_seconds_alone() -> None:
    state = make_state()
    cadence = Cadence(every_secs=10)
    due = []
    for step in range(1, 9):
        state.step, state.clock_s = step, 50.0 + 4 * step
        if cadence.due_step(state):
            due.append(step)
    assert due == [4, 7]


def test_nothing_given_is_never_due() -> None:
    state = make_state()
    state.step, state.epoch, state.clock_s = 1, 1, 1e9
    assert not Cadence().due_step(state)
    assert not Cadence().due_epoch(state)


@pytest.mark.parametrize(
    "bad",
    [{"every_steps": 0}, {"every_steps": 1.5}, {"every_epochs": True}, {"every_secs": 0}],
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Cadence(**bad)
