"""The lock of a run folder: its owner, and its release."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from runner_parts import Command
from torch import nn

from stepwrap.runner import Runner
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import SupervisedModel


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_is_gone(
    start: Callable[..., Command], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Workers live some seconds longer, but must not hold the lock.
    slow = ("data.train.dataset.pause_s=0.01", "train.max_epochs=500", "data.train.num_workers=1")
    words = ("train", "points.yaml", "--run-dir", "run")
    running = start(*words, *slow)
    running.wait_for(run / "run", 2)
    before = set((run / "run/checkpoints").glob("step_*"))
    for how in ((), ("--resume",), ("--fresh",)):
        assert main([*words, *how]) == 2
        message = capsys.readouterr().err
        owner = f"run is in use by process {running.process.pid} on {socket.gethostname()}, since "
        assert owner in message
        assert "another run with --run-dir run-2" in message
    assert before <= set((run / "run/checkpoints").glob("step_*"))
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    assert main([*words, "--resume", "train.max_epochs=1"]) == 0
    assert not (run / "run/run.lock").exists()


def make_runner(run_dir: Path) -> Runner:
    return Runner(SupervisedModel(nn.Linear(2, 2), nn.CrossEntropyLoss()), run_dir=run_dir)


def _refused(run_dir: Path) -> str:
    runner = make_runner(run_dir)
    with pytest.raises(BlockingIOError) as caught, runner.hold_run_dir():
        pass
    return str(caught.value)


def test_every_rank_is_refused(tmp_path: Path) -> None:
    with make_runner(tmp_path).hold_run_dir():
        message = f"{tmp_path} is in use by process {os.getpid()} on "
        assert all(text.startswith(message) for text in run_ranks(_refused, 2, tmp_path))
    with make_runner(tmp_path).hold_run_dir():
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_as_run_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_words = ["train", "points.yaml", "--run-dir", ".", "train.max_epochs=1"]
    assert main(command_words) == 0
    assert main(command_words) == 2
    assert f"start another one with --run-dir {run}-2" in capsys.readouterr().err


def test_a_folder_that_cannot_be_created(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the folder points.yaml/run cannot be created: Not a directory\n"
    assert main(["train", "points.yaml", "--run-dir", "points.yaml/run"]) == 2
    assert capsys.readouterr().err == f"--run-dir: {reason}"
    assert main(["train", "points.yaml", "run_dir=points.yaml/run"]) == 2
    assert capsys.readouterr().err == f"override run_dir=points.yaml/run: run_dir: {reason}"
