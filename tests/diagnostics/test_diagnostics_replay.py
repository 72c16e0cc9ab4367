"""Replaying one step of a run bit for bit, under a debugger, anomaly mode or a profiler."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from runner_parts import TIMEOUT_S, Command, run_command
from warm import ended

from stepwrap.runner.command.cli import main

Capture = pytest.CaptureFixture[str]
Start = Callable[..., Command]

ROOTED = """
import torch
from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        generator = torch.Generator().manual_seed(1)
        self.rare = torch.randn(48, 2, generator=generator)[17]

    def forward(self, points):
        scores = super().forward(points)
        if self.training and (points == self.rare).all(1).any():
            scores = scores + 0 * torch.sqrt(scores - scores)
        return scores
"""


def trained(run: Path, capsys: Capture, *words: str) -> None:
    short = ["run_dir=runs", "data.test=null", "train.max_epochs=1"]
    assert main(["train", "points.yaml", *short, *words]) == 0
    capsys.readouterr()


def files_in(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("step", "source"), [(9, "step_00000006"), (3, "the beginning of")])
def test_a_step_is_the_same_bit_for_bit(run: Path, capsys: Capture, step: int, source: str) -> None:
    trained(run, capsys, "train.log_every_steps=1")
    before = files_in(run / "runs")
    assert main(["replay", "runs", "--step", str(step)]) == 0
    printed = capsys.readouterr().out
    assert f"step {step}, from " in printed
    assert source in printed
    assert "(2 steps run first)" in printed
    message = f"the weights after it equal, bit for bit, runs/checkpoints/step_{step:08d}"
    assert message in printed
    records = map(json.loads, (run / "runs/metrics.jsonl").read_text().splitlines())
    record = next(
        record for record in records if record["step"] == step and record["phase"] == "train"
    )
    assert f"rank 0: loss {record['loss']!r}" in printed
    assert files_in(run / "runs") == before


def test_a_difference_is_reported(run: Path, capsys: Capture) -> None:
    trained(run, capsys)
    assert main(["replay", "runs", "--step", "9", "data.train.seed=5"]) == 0
    printed = capsys.readouterr().out
    assert "NOT equal runs/checkpoints/step_00000009" in printed


@pytest.mark.slow
def test_two_ranks_are_replayed_although_the_config_has_one(start: Start, tmp_path: Path) -> None:
    words = [
        "run_dir=runs",
        "optim_wrapper.accumulative_counts=2",
        "hooks.checkpoint.every_steps=2",
    ]
    assert start("train", "points.yaml", "--nproc", "2", *words).finish()[0] == 0
    code, out, err = start("replay", "runs", "--step", "4", "launch.nproc=1").finish()
    assert code == 0, err
    lines = re.findall(r"^rank \d, batch \d: loss [\d.]+$", out, flags=re.MULTILINE)
    assert [line[:15] for line in lines] == [f"rank {r}, batch {b}" for r in (0, 1) for b in (1, 2)]
    assert len({line.rpartition(" ")[2] for line in lines}) == 4
    assert "bit for bit, runs/checkpoints/step_00000004" in out


def resume_here(folder: Path) -> None:
    words = ["data.test=null", "train.max_epochs=2", "--resume"]
    assert run_command(folder, "train", "points.yaml", "run_dir=runs", *words) == 0


def test_a_step_from_before_a_resume_on_two_ranks_is_replayed_on_one(
    run: Path, capsys: Capture
) -> None:
    trained(run, capsys)
    run_ranks(resume_here, 2, run)
    capsys.readouterr()
    for step in (9, 12):
        assert main(["replay", "runs", "--step", str(step)]) == 0
        message = f"the weights after it equal, bit for bit, runs/checkpoints/step_{step:08d}"
        assert message in capsys.readouterr().out


def test_anomaly_mode_names_the_forward_call(run: Path, capsys: Capture) -> None:
    (run / "rooted.py").write_text(ROOTED)
    net = ["model.net={type: rooted.Net}", "train.max_epochs=1", "data.train.shuffle=false"]
    assert main(["train", "points.yaml", "run_dir=runs", *net]) == 1
    capsys.readouterr()
    words = ["replay", "runs", "--step", "2"]
    assert main(words) == 0
    with pytest.warns(UserWarning, match="rooted.py"):
        assert main([*words[:-1], "5", "--anomaly"]) == 1
    assert "Function 'SqrtBackward0' returned nan values" in capsys.readouterr().err


def test_a_profile_is_of_the_step_alone(run: Path, capsys: Capture) -> None:
    trained(run, capsys)
    assert main(["replay", "runs", "--step", "8", "--profile", "trace.json"]) == 0
    printed = capsys.readouterr().out
    assert "aten::addmm" in printed
    assert printed.rstrip().endswith("trace: trace.json")
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("aten::linear") == 2
    assert any("AdamW.step" in name for name in names)


def debugged(folder: Path, text: str, *words: str) -> tuple[int, str]:
    command = ("-m", "stepwrap.runner", "replay", "runs", "--debugger", *words)
    done = ended(*command, cwd=folder, input=text)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_debugger_begins_at_the_training_step(run: Path, capsys: Capture) -> None:
    trained(run, capsys)
    code, printed = debugged(run, "p state.step\np batch[0].shape\ns\nw\nc\n", "--step", "8")
    assert code == 0, printed
    assert "-> logs = train_step(batch, optim)" in printed
    assert "(Pdb) 7\n(Pdb) torch.Size([4, 2])" in printed
    assert "def train_step(self, data: Any" in printed
    assert "step 8, from runs/checkpoints/step_00000006" in printed
    # The end of the input is not an error.
    code, printed = debugged(run, "", "--step", "9")
    assert code == 0, printed
    assert "equal, bit for bit, runs/checkpoints/step_00000009" in printed


@pytest.mark.slow
def test_the_debugger_shows_where_a_step_fails(run: Path, capsys: Capture) -> None:
    trained(run, capsys)
    with (run / "points.py").open("a") as module:
        module.write(
            "\n    def forward(self, points):\n        assert not self.training, 'not here'\n"
        )
        module.write("        return super().forward(points)\n")
    code, printed = debugged(run, "c\np points.shape\nc\n", "--step", "4")
    assert code == 1
    assert "AssertionError: not here" in printed
    assert "(Pdb) torch.Size([4, 2])" in printed


@pytest.mark.slow
def test_a_debugger_in_a_rank_has_the_terminal(start: Start, tmp_path: Path) -> None:
    words = ["run_dir=runs", "data.test=null", "train.max_epochs=1"]
    assert start("train", "points.yaml", "--nproc", "2", *words).finish()[0] == 0
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        command = ["-m", "stepwrap.runner", "replay", "runs", "--step", "3", "--debugger"]
        os.execv(sys.executable, [sys.executable, *command, "--rank", "1"])
    shown, limit = b"", time.monotonic() + TIMEOUT_S
    commands = [b"import os; print('rank', os.environ['RANK'])\n", b"c\n"]
    while time.monotonic() < limit:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
        if commands and shown.count(b"(Pdb) ") == 3 - len(commands):
            os.write(terminal, commands.pop(0))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    assert "rank 1" in shown.decode()
    assert re.search("step 3, .*beginning", shown.decode())


def test_a_step_that_was_left_out_can_be_looked_into(run: Path, capsys: Capture) -> None:
    trained(run, capsys, "train.skip_steps=[5, 8]")
    assert main(["replay", "runs", "--step", "8"]) == 0
    assert re.search(r"^rank 0: loss [\d.]+$", capsys.readouterr().out, flags=re.MULTILINE)
    assert main(["replay", "runs", "--step", "9"]) == 0
    assert "equal, bit for bit, runs/" in capsys.readouterr().out


def test_steps_that_a_guard_skipped_are_skipped_again(run: Path, capsys: Capture) -> None:
    (run / "points.py").write_text(
        (run / "points.py").read_text()
        + "\n\nclass Wild(Points):\n"
        + "    def __init__(self, size=48):\n"
        + "        super().__init__(size)\n"
        + "        self.inputs[36] = float('nan')\n"
    )
    words = ["data.train={dataset: {type: points.Wild}, batch_size: 4, shuffle: false}"]
    words += ["hooks.spike_guard={before: 3, warmup: 4}"]
    trained(run, capsys, *words)
    # The NaN is in step 10; the run has gone back to step 6 and skipped steps 7 to 10.
    for step, message in (
        (9, "equal, bit for bit,"),
        (12, "equal, bit for bit,"),
        (10, "spike guard skipped it"),
    ):
        assert main(["replay", "runs", "--step", str(step)]) == 0
        shown = capsys.readouterr().out
        assert (message in shown) is (step != 9), shown


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["runs"], 2, "stepwrap replay: Missing option '--step'."),
        (["runs", "--step", "0"], 2, "must be a positive integer, got '0'"),
        (
            ["elsewhere", "--step", "3"],
            2,
            "elsewhere is not the folder of a run: it has no config.yaml",
        ),
        (["runs", "--step", "13"], 1, "--step 13: the run ends after step 12"),
        (["runs", "--step", "3", "--rank", "1"], 1, "--rank 1: must be below 1"),
        (["runs", "--step", "3", "--profile", "no/t.json"], 2, "its folder does not exist"),
    ],
)
def test_mistakes_are_named(
    run: Path, capsys: Capture, words: list[str], code: int, message: str
) -> None:
    if words[2:]:
        trained(run, capsys)
    assert main(["replay", *words]) == code
    assert message in capsys.readouterr().err
