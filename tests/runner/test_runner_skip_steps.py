"""Steps skipped from the command line: messages, the checkpoint to resume from, results."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner_parts import final_weights, records

from stepwrap.loops import list_checkpoints
from stepwrap.registry import load_config
from stepwrap.runner.command.cli import main

Capture = pytest.CaptureFixture[str]


def read_steps(folder: Path) -> list[int]:
    return sorted(meta["step"] for _, meta in list_checkpoints(folder / "checkpoints"))


@pytest.mark.slow
def test_a_run_goes_back_to_before_the_step(run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml", "run_dir=plain"]) == 0
    words = ["train", "points.yaml", "run_dir=plain", "--resume", "--without-step", "20"]
    assert main([*words, "--without-step=26-27"]) == 0
    message = capsys.readouterr().err
    assert "continuing from plain/checkpoints/step_00000018, step 18" in message
    skips = ["train.skip_steps=[20, '26-27']", "run_dir=known"]
    assert main(["train", "points.yaml", *skips]) == 0
    assert load_config("plain/config.yaml").select("train.skip_steps") == [20, "26-27"]
    ours, skipped = final_weights(run / "plain"), final_weights(run / "known")
    assert all(ours[name].equal(skipped[name]) for name in skipped)
    assert main(["train", "points.yaml", "run_dir=all"]) == 0
    every = final_weights(run / "all")
    assert not all(ours[name].equal(every[name]) for name in every)
    assert read_steps(run / "plain") == read_steps(run / "all")
    # Later resumes of the written config do not go back again.
    assert main(["train", "plain/config.yaml", "--resume", "train.max_epochs=5"]) == 0
    assert "continuing from plain/checkpoints/step_00000048" in capsys.readouterr().err
    assert max(record["step"] for record in records(run / "plain")) == 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--without-step", "0"], "must be a step number or a range such as 1200-1210"),
        (["--without-step", "9-7"], "skip_steps must hold step numbers >= 1"),
        (["train.skip_steps=[1.5]"], "train.skip_steps: cannot be built: ValueError: skip_steps"),
        (["train.skip_steps=-7"], "train.skip_steps: cannot be built: ValueError: skip_steps must"),
        (["--resume", "--without-step", "2"], "runs has no earlier checkpoint; --fresh"),
        (
            ["--resume", "latest", "--without-step", "5"],
            "--without-step 5: runs/checkpoints/step_00000012-5 includes this step already",
        ),
    ],
)
def test_mistakes_are_named(run: Path, capsys: Capture, words: list[str], message: str) -> None:
    if "--resume" in words:
        once = ["train.max_epochs=1", "run_dir=runs", "data.test=null"]
        assert main(["train", "points.yaml", *once]) == 0
        capsys.readouterr()
    assert main(["train", "points.yaml", "run_dir=runs", *words]) == 2
    assert message in capsys.readouterr().err
