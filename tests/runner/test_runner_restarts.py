"""Trainings that the launcher restarts after a rank has died."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import nightly
from ranks import run_ranks
from runner_parts import Command, assert_identical
from test_runner_stop import SLOW, TRAIN, timeless_records, train_here

from stepwrap.loops import NoteStepHook, find_checkpoint, load_checkpoint
from stepwrap.runner.jobs import next_attempt

Start = Callable[..., Command]


IN_ORDER = "data.train.shuffle=false"


def assert_equals_uninterrupted(folder: Path, nproc: int, *settings: str) -> None:
    """Compare the run in a folder with an uninterrupted one."""
    run_ranks(train_here, nproc, folder, "whole", False, *settings)
    newest = [find_checkpoint(folder / name) for name in ("run", "whole")]
    run, uninterrupted = (load_checkpoint(path).read("model") for path in newest if path)
    assert_identical(run, uninterrupted)
    trained = [
        record for record in timeless_records(folder / "run") if record.get("phase") != "test"
    ]
    assert trained == timeless_records(folder / "whole")


@pytest.mark.parametrize(
    ("nproc", "wrapper"),
    [(2, "ddp"), (2, "fsdp"), *nightly((1, "single"), (3, "ddp"), (3, "fsdp"))],
)
@pytest.mark.slow
def test_a_killed_rank_restarts_all_and_does_not_change_the_weights(
    start: Start, tmp_path: Path, nproc: int, wrapper: str
) -> None:
    settings = (IN_ORDER, f"wrapper.type={wrapper}")
    # The last sample of the first epoch kills the last rank.
    bad = ("bad=47", f"bad_rank={nproc - 1}", "deadly=true")
    deadly = [f"data.train.dataset.{setting}" for setting in bad]
    # The last checkpoint is complete before the rank dies.
    deadly.append("hooks.checkpoint.background=false")
    command = start(*TRAIN, f"--nproc={nproc}", "--max-restarts=2", *settings, *deadly)
    code, _, err = command.finish()
    assert code == 0, err
    done = 12 // nproc - 1
    saved = f"run/checkpoints/step_{done // 3 * 3:08d}"
    ranks = "the only rank" if nproc == 1 else f"all {nproc} ranks"
    why = "the process was killed by SIGKILL: is the machine out of memory?"
    lines = err.splitlines()
    # A remaining rank may log this before it is ended.
    if lines[0].startswith("no checkpoint of step"):
        assert "sharded over the ranks" in lines.pop(0)
    assert lines == [
        f"rank {nproc - 1} failed after step {done}: ProcessKilled: {why}",
        f"restarting {ranks} from {saved}; 1 of 2 restarts left",
        f"continuing from {saved}, step {done // 3 * 3}",
    ]
    assert command.wait_gone() == []
    assert_equals_uninterrupted(tmp_path, nproc, *settings)


@pytest.mark.slow
def test_a_kill_from_outside_restarts_all(start: Start, tmp_path: Path) -> None:
    slowly = "data.train.dataset.pause_s=0.05"
    command = start(*TRAIN, "--nproc=2", "--max-restarts=1", slowly)
    command.wait_for(tmp_path / "run", 2)
    os.kill(command.get_process(1), signal.SIGKILL)
    code, _, err = command.finish()
    assert code == 0, err
    assert "; 0 of 1 restarts left" in err
    assert_equals_uninterrupted(tmp_path, 2)


BAD = (IN_ORDER, "data.train.dataset.bad=41", "data.train.dataset.always=true")


@pytest.mark.slow
def test_the_same_error_at_the_same_step_three_times_ends_the_training(
    start: Start, tmp_path: Path
) -> None:
    code, _, err = start(*TRAIN, *BAD, "launch.max_restarts=9").finish()
    assert code == 1
    lines = err.splitlines()
    restarts = [line for line in lines if line.startswith("restarting")]
    for line, remaining in zip(restarts, (8, 7), strict=True):
        assert re.search(f"only rank .*run/checkpoints/step_00000009; {remaining} of 9 ", line)
    failed = "^rank 0 failed .*step 10: ValueError: sample 41 is broken$"
    assert len(re.findall(failed, err, re.M)) == 3
    (message,) = (n for n, line in enumerate(lines) if line.startswith("not restarted: "))
    assert re.search("same error .*same step 3 times", lines[message])
    assert lines[message + 1] == "ValueError: sample 41 is broken (rank 0)"


@pytest.mark.slow
def test_the_command_ends_with_the_error_of_the_last_restart(start: Start, tmp_path: Path) -> None:
    of_rank_1 = ("data.train.dataset.deadly=true", "data.train.dataset.bad_rank=1")
    deadly = (*of_rank_1, "hooks.checkpoint=false")
    code, _, err = start(*TRAIN, *BAD, *deadly, "--nproc=2", "--max-restarts=1").finish()
    assert code == 1
    assert re.search("restarting all 2 ranks .*beginning; 0 of 1 ", err)
    assert re.search(r"not restarted: .*launch\.max_restarts is 1\)\nProcessKilled: ", err)


@pytest.mark.slow
def test_a_stopped_training_is_not_restarted(start: Start, tmp_path: Path) -> None:
    command = start(*TRAIN, "--nproc=2", "--max-restarts=1", SLOW, "train.max_epochs=500")
    command.wait_for(tmp_path / "run", 2)
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.finish()
    assert (code, "restart" in err) == (143, False), err


def test_a_restart_starts_like_the_failed_attempt_unless_that_has_saved() -> None:
    for resume, fresh in ((False, True), ("elsewhere", False)):
        again = next_attempt(resume, False, has_saved=False)
        assert again == (resume, fresh)
        assert next_attempt(*again, has_saved=True) == (True, False)


def test_a_step_that_was_not_noted_is_not_guessed(tmp_path: Path) -> None:
    assert NoteStepHook.read(tmp_path / "0") == -1
    NoteStepHook(tmp_path / "0")
    assert NoteStepHook.read(tmp_path / "0") == -1
