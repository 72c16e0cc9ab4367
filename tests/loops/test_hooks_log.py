"""The record files: JSON lines and the CSV table."""

from __future__ import annotations

import csv
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hook_runs import new_state, train
from listeners import on
from ranks import run_ranks

from stepwrap.loops import CheckpointHook, LogHook, TensorBoardHook
from stepwrap.loops.hook import Scalars
from stepwrap.loops.state import LoopState, Phase


def extra(values: dict[str, float], *, from_step: int = 0) -> Any:
    """Return a hook that adds values to the log records from a step on."""

    def collect_logs(state: LoopState, scalars: Scalars) -> None:
        scalars |= values if state.step >= from_step else {}

    return on(collect_logs=collect_logs)


def json_records(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def csv_records(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder: Path) -> list[tuple[int, str]]:
    """Return step and phase of each record; fail unless both files have the same values."""
    records = json_records(folder)
    for row, record in zip(csv_records(folder), records, strict=True):
        assert {k: v for k, v in row.items() if v} == {k: str(v) for k, v in record.items()}
    return [(record["step"], record["phase"]) for record in records]


def test_a_record_for_each_log_and_evaluation(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook()])
    assert steps(tmp_path) == [
        (2, "train"), (4, "train"), (4, "val"), (6, "train"), (8, "train"), (8, "val")
    ]  # fmt: skip
    records = json_records(tmp_path)
    assert list(records[0]) == ["step", "epoch", "phase", "time", "loss"]
    assert [record["epoch"] for record in records] == [1, 1, 1, 2, 2, 2]
    assert list(csv_records(tmp_path)[0]) == ["step", "epoch", "phase", "time", "loss", "error"]


def test_columns_may_come_later(tmp_path: Path) -> None:
    late = extra({"late": 1.5}, from_step=6)
    train(new_state(run_dir=tmp_path), [LogHook(), late], val_loop=None)
    assert [row["late"] for row in csv_records(tmp_path)] == ["", "", "1.5", "1.5"]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    wild = extra({"a": float("nan"), "b": float("inf"), "c": float("-inf")})
    train(new_state(run_dir=tmp_path), [LogHook(), wild], val_loop=None)
    assert [json_records(tmp_path)[0][name] for name in "abc"] == [None] * 3
    assert [csv_records(tmp_path)[0][name] for name in "abc"] == ["nan"] * 3


def test_a_value_named_like_a_fixed_column(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook(), extra({"time": 3.0})], val_loop=None)
    record = json_records(tmp_path)[0]
    assert record["time_"] == 3.0
    assert record["time"] > 1e9


def test_a_resume_drops_the_records_after_its_checkpoint(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook()])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "epo')
    state = new_state(run_dir=tmp_path)
    state.step, state.iteration, state.epoch, state.evaluated_at = 4, 4, 1, 4
    train(state, [LogHook()])
    expected = [(2, "train"), (4, "train"), (4, "val"), (6, "train"), (8, "train"), (8, "val")]
    assert steps(tmp_path) == expected


def test_a_pending_validation_is_not_recorded_twice(tmp_path: Path) -> None:
    hook, state = LogHook(), new_state(run_dir=tmp_path)
    state.step = 4
    hook.on_log(state, {"loss": 1.0})
    state.phase = Phase.VAL
    hook.on_eval_end(state, {"error": 1.0})
    hook.on_train_end(state)
    hook.on_train_start(state)  # restored from before the validation: evaluated_at is -1
    hook.on_eval_end(state, {"error": 1.0})
    hook.on_run_end(state)
    assert steps(tmp_path) == [(4, "train"), (4, "val")]


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook()])
    train(new_state(run_dir=tmp_path), [LogHook()], epochs=1)
    assert steps(tmp_path) == [(2, "train"), (4, "train"), (4, "val")]


def test_a_test_alone_adds_to_the_records(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook()], epochs=1)
    state = new_state(run_dir=tmp_path)
    state.phase, state.step = Phase.TEST, 4
    hook = LogHook()
    hook.on_eval_end(state, {"error": 0.5})
    hook.on_run_end(state)
    assert steps(tmp_path)[-2:] == [(4, "val"), (4, "test")]


def test_each_record_is_on_file_at_once(tmp_path: Path) -> None:
    hook, state = LogHook(), new_state(run_dir=tmp_path)
    hook.on_train_start(state)
    hook.on_log(state, {"loss": 0.5})
    assert json_records(tmp_path)[0]["loss"] == 0.5
    assert csv_records(tmp_path)[0]["loss"] == "0.5"
    hook.on_run_end(state)


@pytest.mark.parametrize("make", [LogHook, TensorBoardHook, partial(CheckpointHook, every_steps=1)])
def test_no_folder_no_files(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if make is TensorBoardHook:
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    state = train(new_state(run_dir=None), [make()])
    assert (state.step, list(tmp_path.iterdir())) == (8, [])


def test_console_lines_when_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(new_state(run_dir=tmp_path / "a"), [LogHook()], epochs=1)
    assert not [r for r in caplog.records if r.name.endswith("loggers.files")]
    train(new_state(run_dir=tmp_path / "b"), [LogHook(console=True)], epochs=1)
    lines = [r.message for r in caplog.records if r.name.endswith("loggers.files")]
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "val"]


def _train_and_list(folder: Path) -> list[str]:
    train(new_state(run_dir=folder), [LogHook()])
    return sorted(path.name for path in folder.iterdir())


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    run_ranks(_train_and_list, 2, tmp_path)
    assert [step for step, phase in steps(tmp_path) if phase == "train"] == [2, 4]


def test_an_evaluation_does_not_change_the_records_of_a_training(tmp_path: Path) -> None:
    training, testing = LogHook(), LogHook()
    state, other = new_state(run_dir=tmp_path), new_state(run_dir=tmp_path)
    other.phase = Phase.TEST
    training.on_train_start(state)
    for step in (1, 2, 3):
        state.step = other.step = step
        training.on_log(state, {"loss": float(step)})
        testing.on_eval_end(other, {f"error {min(step, 2)}": float(step)})
    training.on_log(state, {"loss": 4.0, "late": 1.0})
    training.on_run_end(state)
    testing.on_run_end(other)
    expected = [*((step, phase) for step in (1, 2, 3) for phase in ("train", "test")), (3, "train")]
    assert steps(tmp_path) == expected


def test_an_evaluation_after_a_crash_begins_a_line(tmp_path: Path) -> None:
    train(new_state(run_dir=tmp_path), [LogHook()], epochs=1, val_loop=None)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "epo')
    (tmp_path / "metrics.csv").unlink()
    state = new_state(run_dir=tmp_path)
    state.phase, state.step = Phase.TEST, 4
    hook = LogHook()
    hook.on_eval_end(state, {"error": 0.5})
    hook.on_run_end(state)
    final_line = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(final_line)["error"] == 0.5
    assert [row["error"] for row in csv_records(tmp_path)] == ["", "", "0.5"]
