"""The TensorBoard writer, read back with TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hook_runs import loader, metrics, new_state, train
from listeners import on
from ranks import run_ranks

from stepwrap.loops import HookList, TensorBoardHook, TestLoop


def scalars(folder: Path) -> dict[str, list[int]]:
    """Return the steps of each scalar in a run's folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_records_and_metrics_and_a_resume_hides_later_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(new_state(run_dir=tmp_path), [TensorBoardHook()])
    assert scalars(tmp_path) == {"train/loss": [2, 4, 6, 8], "val/error": [4, 8]}
    state = new_state(run_dir=tmp_path)
    state.step, state.iteration, state.epoch, state.evaluated_at = 4, 4, 1, 4
    train(state, [TensorBoardHook()])
    assert scalars(tmp_path) == {"train/loss": [2, 4, 6, 8], "val/error": [4, 8]}


def test_an_evaluation_of_an_earlier_checkpoint_hides_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(new_state(run_dir=tmp_path), [TensorBoardHook()])
    state = new_state(run_dir=tmp_path)
    # Logged before the checkpoint is restored, at step 0.
    note = on(order=90, on_run_start=lambda state: state.log_text("note", "tests step 4"))
    hooks = HookList([TensorBoardHook(), note])
    hooks.emit("on_run_start", state)
    state.step, state.epoch = 4, 1
    TestLoop(loader(8), metrics()).run(state, hooks)
    hooks.emit("on_run_end", state)
    assert scalars(tmp_path) == {
        "train/loss": [2, 4, 6, 8],
        "val/error": [4, 8],
        "test/error": [4],
    }


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"`pip install stepwrap\[tensorboard\]`"):
        TensorBoardHook()


def _train(folder: Path) -> None:
    train(new_state(run_dir=folder), [TensorBoardHook()])


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_ranks(_train, 2, tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
