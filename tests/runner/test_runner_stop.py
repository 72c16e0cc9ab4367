"""Runs that end before their time: signals, kills, errors; and what --resume makes of them."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from runner_parts import Command, assert_identical, final_weights

from stepwrap.registry import load_config
from stepwrap.runner import Runner
from stepwrap.runner.cli import main

SLOW = "data.train.dataset.pause_s=0.005"

Start = Callable[..., Command]
TRAIN = ("train", "points.yaml", "--run-dir", "run")


def train_here(config: Path, run_dir: Path, resume: bool) -> None:
    """Train as the command does, on the ranks that are here."""
    sys.modules.pop("points", None)
    settings = load_config(config, [f"run_dir={run_dir}", "hooks.progress=false"])
    Runner.from_config(settings).train(resume=resume)


def test_a_killed_run_resumes_to_the_very_same_weights(start: Start, tmp_path: Path) -> None:
    killed = start(*TRAIN, "--nproc=2", SLOW)
    killed.wait_for(tmp_path / "run", random.randint(1, 5))
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.wait_gone() == []
    config = tmp_path / "points.yaml"
    run_ranks(train_here, 2, config, tmp_path / "run", resume=True)
    run_ranks(train_here, 2, config, tmp_path / "whole", resume=False)
    assert_identical(final_weights(tmp_path / "run"), final_weights(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("number", "nproc", "told"),
    [
        (signal.SIGTERM, 1, "stopped by SIGTERM"),
        (signal.SIGINT, 2, "stopped by Ctrl-C"),
        (signal.SIGHUP, 1, "stopped by SIGTERM"),
        (signal.SIGHUP, 2, "stopped by SIGTERM"),
    ],
)
def test_a_signal_saves_says_where_and_leaves_no_process(
    start: Start, tmp_path: Path, number: signal.Signals, nproc: int, told: str
) -> None:
    command = start(*TRAIN, f"--nproc={nproc}", SLOW, "train.max_epochs=500")
    command.wait_for(tmp_path / "run", 2)
    if number == signal.SIGINT:
        # A terminal sends Ctrl-C to the whole group.
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    code, out, err = command.finish()
    ended_by = signal.SIGTERM if number == signal.SIGHUP else number
    assert code == 128 + ended_by, out
    again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
    assert err == f"\nstopping after this step, to save{again}\n"
    assert command.left_over() == []
    line = next(line for line in out.splitlines() if line.startswith(told))
    saved = tmp_path / line.partition("saved ")[2]
    step = json.loads((saved / "checkpoint.json").read_text())["step"]
    assert f"at step {step} " in line
    assert "continue with: stepwrap train run/config.yaml --resume" in out


def test_the_resume_that_is_advised_ends_like_any_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at_7 = "hooks.stop={type: runner_parts.SignalHook, at_step: 7}"
    assert main(["train", "points.yaml", stop_at_7]) == 128 + signal.SIGTERM
    advice = capsys.readouterr().out.splitlines()[-1]
    words = advice.partition("stepwrap ")[2].split()
    assert main([*words, "hooks.stop=false"]) == 0
    assert "val epoch 4/4 step 48/48" in capsys.readouterr().out
    assert main(["train", "points.yaml", "--run-dir", "whole"]) == 0
    assert_identical(final_weights(run / "runs/points"), final_weights(run / "whole"))


def test_a_signal_before_training_ends_it_quietly(start: Start, tmp_path: Path) -> None:
    command = start(*TRAIN, "--nproc=2")
    while len(command.left_over()) < 3:
        time.sleep(0.01)
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, err = command.finish()
    assert code == 128 + signal.SIGINT
    assert err.splitlines() == [err.strip()]
    assert "nothing was saved" in err


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_in_the_final_test_tells_what_is_saved(
    start: Start, tmp_path: Path, nproc: int
) -> None:
    # The test would take most of a minute.
    slow_test = ("data.test.dataset.pause_s=1", "data.test.dataset.mark=tested")
    command = start(*TRAIN, f"--nproc={nproc}", "train.max_epochs=1", *slow_test)
    command.wait_until((tmp_path / "tested").exists, "no test")
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.finish()
    assert code == 128 + signal.SIGTERM
    last = f"run/checkpoints/step_{12 // nproc:08d}"
    assert err.startswith(f"stopped by SIGTERM; the last checkpoint is {last}")


def test_a_raising_rank_ends_all_and_is_named(start: Start, tmp_path: Path) -> None:
    bad = ("data.train.dataset.bad=7", "data.train.dataset.bad_rank=1")
    command = start(*TRAIN, "--nproc=2", "data.train.shuffle=false", *bad)
    code, _, err = command.finish()
    assert code == 1
    first, place, _, hint = err.splitlines()
    assert first == "ValueError: sample 7 is broken (rank 1)"
    assert place.startswith(f"  at {tmp_path / 'points.py'}:")
    assert place.endswith("in __getitem__")
    assert "--debug" in hint
    assert command.left_over() == []


def test_a_killed_rank_is_named(start: Start, tmp_path: Path) -> None:
    bad = (
        "data.train.dataset.bad=7",
        "data.train.dataset.bad_rank=1",
        "data.train.dataset.deadly=true",
    )
    command = start(*TRAIN, "--nproc=2", "data.train.shuffle=false", *bad)
    code, _, err = command.finish()
    assert code == 1
    assert "killed by SIGKILL" in err
    assert "rank 1" in err
    assert command.left_over() == []
