"""The TensorBoard writer, read back with TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hook_runs import loader, metrics, new_state, train
from listeners import on, stop_at
from ranks import run_ranks

from stepwrap.loops import (
    CheckpointHook,
    HookList,
    LoggerHook,
    LogHook,
    LoopState,
    TensorBoardHook,
    TestLoop,
    load_checkpoint,
)


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


class Service(LoggerHook):
    """A logger that keeps what it gets, as W&B and MLflow do."""

    def __init__(self, points: list[tuple[str, int]]) -> None:
        super().__init__()
        self.points = points

    def scalars(self, state: LoopState, phase: str, values: Mapping[str, float]) -> None:
        self.points.append((phase, state.step))


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_a_stop_inside_an_interval_leaves_no_point(tmp_path: Path, stop: int) -> None:
    pytest.importorskip("tensorboard")
    points: list[tuple[str, int]] = []
    for is_resumed in (False, True):
        state = new_state(run_dir=tmp_path)
        if is_resumed:
            (saved,) = (tmp_path / "checkpoints").iterdir()
            load_checkpoint(saved).restore(state)
        hooks = [CheckpointHook(every_epochs=None), stop_at(None if is_resumed else stop)]
        train(state, [TensorBoardHook(), LogHook(), Service(points), *hooks], log_every_steps=3)
        if not is_resumed:
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert stop in [json.loads(line)["step"] for line in lines]
    # The run ends inside an interval as well; that record stays.
    assert scalars(tmp_path) == {"train/loss": [3, 6, 8], "val/error": [4, 8]}
    assert sorted(points) == [
        *(("train", step) for step in (3, 6, 8)),
        *(("val", step) for step in (4, 8)),
    ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records if record["phase"] == "train"] == [3, 6, 8]


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
