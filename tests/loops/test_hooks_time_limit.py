"""The hook that ends training after a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hook_runs import new_state, train
from listeners import on, slow
from ranks import run_ranks

from stepwrap.loops import CheckpointHook, TimeLimitHook


def test_training_ends_with_a_checkpoint_and_a_reason(tmp_path: Path) -> None:
    state = new_state(run_dir=tmp_path)
    # Each update takes longer than the limit, so the first check ends the training.
    train(state, [TimeLimitHook(max_seconds=0.001), CheckpointHook(), slow(1.2)], epochs=50)
    assert state.stop_reason == "max_seconds is 0.001"
    assert 0 < state.step < 10
    *_, saved = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert int(saved.name.removeprefix("step_")) == state.step


def _stopped_at(limit_s: float) -> tuple[int, str]:
    state = new_state()
    train(state, [TimeLimitHook(max_seconds=limit_s), slow(0.3)], epochs=50)
    return state.step, state.stop_reason


def test_all_ranks_end_at_the_same_update() -> None:
    rank_0, second = run_ranks(_stopped_at, 2, 0.5)
    assert rank_0 == second
    assert rank_0[0] < 100
    assert rank_0[1] == "max_seconds is 0.5"


def test_enough_time_changes_nothing() -> None:
    state, steps = new_state(), []
    train(state, [TimeLimitHook(max_seconds=1e6), on(on_update=lambda s: steps.append(s.step))])
    assert steps == [*range(1, 9)]
    assert state.stop_reason == ""


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="max_seconds must be more than 0"):
        TimeLimitHook(max_seconds=limit)
