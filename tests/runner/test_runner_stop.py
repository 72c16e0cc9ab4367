"""Runs that end early by signals, kills or errors, and their --resume."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import nightly, slow
from ranks import run_ranks
from runner_parts import Command, assert_identical, final_weights, points_config, records

from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main

SLOW = "data.train.dataset.pause_s=0.005"

Start = Callable[..., Command]
TRAIN = ("train", "points.yaml", "--run-dir", "run")


def train_here(folder: Path, run: str, resume: bool, *overrides: str) -> None:
    """Train as the command does, on the current ranks."""
    config = points_config(folder, f"run_dir={folder / run}", *overrides)
    Runner.from_config(config).train(resume=resume)


def assert_same_as_whole(folder: Path, *overrides: str) -> None:
    """Resume a run on two ranks and compare it with an uninterrupted one."""
    run_ranks(train_here, 2, folder, "run", True, *overrides)
    run_ranks(train_here, 2, folder, "whole", False, *overrides)
    assert_identical(final_weights(folder / "run"), final_weights(folder / "whole"))
    assert timeless_records(folder / "run") == timeless_records(folder / "whole")


def timeless_records(run_dir: Path) -> list[dict[str, float | str]]:
    """Return the log records of a run without the values that depend on time."""
    timed = {"time", "samples_per_s", "steps_per_s", "data_share"}
    timed |= {"hooks_share", "slowest_rank", "rank_wait_share"}
    return [{k: v for k, v in record.items() if k not in timed} for record in records(run_dir)]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_very_same_weights(start: Start, tmp_path: Path) -> None:
    killed = start(*TRAIN, "--nproc=2", SLOW)
    killed.wait_for(tmp_path / "run", random.randint(1, 5))
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.wait_gone() == []
    assert_same_as_whole(tmp_path)


@pytest.mark.parametrize(
    ("number", "nproc", "message"),
    [
        (signal.SIGTERM, 1, "stopped by SIGTERM"),
        *slow(
            (signal.SIGINT, 2, "stopped by Ctrl-C"),
            (signal.SIGUSR1, 1, "stopped by SIGTERM"),
            (signal.SIGHUP, 2, "stopped by SIGTERM"),
        ),
        *nightly(
            (signal.SIGUSR1, 2, "stopped by SIGTERM"),
            (signal.SIGHUP, 1, "stopped by SIGTERM"),
        ),
    ],
)
def test_a_signal_saves_a_checkpoint_and_leaves_no_process(
    start: Start, tmp_path: Path, number: signal.Signals, nproc: int, message: str
) -> None:
    words = ("train.max_epochs=500", "schedulers.T_max=500")
    command = start(*TRAIN, f"--nproc={nproc}", SLOW, *words)
    command.wait_for(tmp_path / "run", 2)
    if number == signal.SIGINT:
        # A terminal sends Ctrl-C to the whole group.
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    code, out, err = command.finish()
    ended_by = number if number == signal.SIGINT else signal.SIGTERM
    assert code == 128 + ended_by, out
    again = "; .*Ctrl-C again.*" if number == signal.SIGINT else ""
    assert re.fullmatch(f"\nstopping after .*to save{again}\n", err)
    assert command.wait_gone() == []
    line = next(line for line in out.splitlines() if line.startswith(message))
    saved = tmp_path / line.partition("saved ")[2]
    step = json.loads((saved / "checkpoint.json").read_text())["step"]
    assert f"at step {step} " in line
    assert "stepwrap train run/config.yaml --resume" in out


OWN_LOADER = "data.train={_delete_: true, type: points.plain_loader"
# Workers of a fork server ignore signals only once they have started, so start them only once.
FORK_SERVER = "multiprocessing_context: forkserver, persistent_workers: true"


@pytest.mark.parametrize(
    ("number", "nproc", "loader"),
    [
        (signal.SIGTERM, 1, f"{OWN_LOADER}}}"),
        (signal.SIGTERM, 2, f"{OWN_LOADER}, {FORK_SERVER}}}"),
        (signal.SIGUSR1, 2, "data.train.num_workers=2"),
        *nightly(
            (signal.SIGTERM, 2, "data.train.num_workers=2"),
            (signal.SIGTERM, 2, f"{OWN_LOADER}, multiprocessing_context: spawn}}"),
            (signal.SIGUSR1, 2, f"{OWN_LOADER}}}"),
        ),
    ],
)
@pytest.mark.slow
def test_a_signal_to_every_process_of_a_job_saves(
    start: Start, tmp_path: Path, number: signal.Signals, nproc: int, loader: str
) -> None:
    """As sent by `scancel`, or by Slurm before the end of a job."""
    words = (
        f"--nproc={nproc}",
        loader,
        "train.max_epochs=500",
        "hooks.progress=false",
        "schedulers.T_max=500",
    )
    command = start(*TRAIN, *words, "hooks.checkpoint.every_steps=1")
    command.wait_for(tmp_path / "run", 2)
    ranks = [command.process.pid]
    if nproc > 1:
        ranks += [command.get_process(rank) for rank in range(nproc)]
    helpers = set(command.left_over()) - set(ranks)
    # First the loaders' workers and fork servers. A run without workers would end within the 4
    # batches that they have prepared.
    for process in helpers:
        os.kill(process, number)
    saved = len(list((tmp_path / "run").glob("checkpoints/step_*")))
    command.wait_for(tmp_path / "run", saved + 10)
    for process in ranks:
        os.kill(process, number)
    code, out, err = command.finish()
    assert code == 128 + signal.SIGTERM, err
    assert re.fullmatch("\nstopping after .*to save\n", err)
    assert "stopped by SIGTERM: at step" in out
    assert command.wait_gone() == []
    # No folders of multiprocessing and no incomplete checkpoints are left either.
    leftovers = [
        *tmp_path.glob("pymp-*"),
        *tmp_path.glob("stepwrap_*"),
        *tmp_path.rglob("incomplete_*"),
    ]
    assert leftovers == []


@pytest.mark.slow
def test_the_resume_that_is_advised_ends_like_any_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at_7 = "hooks.stop={type: runner_parts.SignalHook, at_step: 7}"
    norms = "hooks.grad_norm={type: GradNormHook}"
    assert main(["train", "points.yaml", norms, stop_at_7]) == 128 + signal.SIGTERM
    advice = capsys.readouterr().out.splitlines()[-1]
    words = advice.partition("stepwrap ")[2].split()
    assert main([*words, "hooks.stop=false"]) == 0
    assert "val epoch 4/4 step 48/48" in capsys.readouterr().out
    assert main(["train", "points.yaml", norms, "--run-dir", "whole"]) == 0
    assert_identical(final_weights(run / "runs/points"), final_weights(run / "whole"))
    assert timeless_records(run / "runs/points") == timeless_records(run / "whole")


@pytest.mark.slow
def test_a_signal_before_training_ends_it_quietly(start: Start, tmp_path: Path) -> None:
    command = start(*TRAIN, "--nproc=2")
    while len(command.left_over()) < 3:
        time.sleep(0.01)
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, err = command.finish()
    assert code == 128 + signal.SIGINT
    assert err.splitlines() == [err.strip()]
    assert "nothing was saved" in err


@pytest.mark.parametrize("nproc", [1, *slow(2)])
@pytest.mark.slow
def test_a_signal_in_the_final_test_names_the_last_checkpoint(
    start: Start, tmp_path: Path, nproc: int
) -> None:
    # Make the test take most of a minute.
    slow_test = ("data.test.dataset.pause_s=1", "data.test.dataset.mark=tested")
    command = start(*TRAIN, f"--nproc={nproc}", "train.max_epochs=1", *slow_test)
    command.wait_until((tmp_path / "tested").exists, "no test")
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.finish()
    assert code == 128 + signal.SIGTERM
    checkpoint = f"run/checkpoints/step_{12 // nproc:08d}"
    assert re.match(f"stopped by SIGTERM; .*last .*{checkpoint}", err)


@pytest.mark.slow
def test_a_raising_rank_ends_all_and_is_named_and_the_resume_is_exact(
    start: Start, tmp_path: Path
) -> None:
    bad = ("data.train.dataset.bad=41", "data.train.dataset.bad_rank=1")
    command = start(*TRAIN, "--nproc=2", "data.train.shuffle=false", *bad)
    code, _, err = command.finish()
    assert code == 1
    message, location, _, hint, saved = (
        line for line in err.splitlines() if "incomplete_" not in line
    )
    assert message == "ValueError: sample 41 is broken (rank 1)"
    assert location.startswith(f"  at {tmp_path / 'points.py'}:")
    assert location.endswith("in __getitem__")
    assert "--debug" in hint
    assert "the last checkpoint is run/checkpoints/step_00000003" in saved
    assert command.wait_gone() == []
    assert_same_as_whole(tmp_path, "data.train.shuffle=false")


@pytest.mark.parametrize(
    ("loader", "deadly", "message"),
    [
        ("train", "true", "killed by SIGKILL"),
        *slow(
            ("train", "exit", "exited with code 0 before its work was done"),
            ("val", "exit", "exited with code 0 before its work was done"),
        ),
    ],
)
@pytest.mark.slow
def test_a_rank_that_is_gone_ends_all_and_is_named(
    start: Start, tmp_path: Path, loader: str, deadly: str, message: str
) -> None:
    bad = (f"data.{loader}.dataset.bad=7", f"data.{loader}.dataset.bad_rank=1")
    how = ("data.train.shuffle=false", f"data.{loader}.dataset.deadly={deadly}")
    command = start(*TRAIN, "--nproc=2", *bad, *how)
    code, _, err = command.finish()
    assert code == 1
    assert message in err.splitlines()[0]
    assert err.splitlines()[0].endswith("(rank 1)")
    assert command.wait_gone() == []
    assert not list(tmp_path.glob("stepwrap_*"))


SLOW_MODULE = """
import os, time

def be_slow():
    open(os.environ["BEGUN"], "w").close()
    try:
        time.sleep(60)
    except BaseException:
        # So does Python's import system now and then.
        raise RecursionError("maximum recursion depth exceeded") from None

class Slow:
    def __init__(self):
        be_slow()
"""


@pytest.mark.parametrize(
    ("at_import", "number"),
    [(True, signal.SIGTERM), *slow((True, signal.SIGINT), (False, signal.SIGTERM))],
)
def test_a_signal_while_the_command_starts_ends_it_as_a_signal(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_import: bool,
    number: signal.Signals,
) -> None:
    more = "be_slow()\n" if at_import else ""
    (tmp_path / "slow.py").write_text(SLOW_MODULE + more)
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    command = start(*TRAIN, "imports=[points.py, slow.py]", "data.train.dataset.type=slow.Slow")
    command.wait_until((tmp_path / "begun").exists, "not begun")
    command.process.send_signal(number)
    code, _, err = command.finish()
    assert code == 128 + number, err
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert err == f"stopped by {name}; nothing was saved\n"
    assert not (tmp_path / "run").exists()
