"""`stepwrap sweep`: space, trials, pruning, failures, stops and resuming."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from runner_parts import Command, assert_identical, final_weights
from torch import nn

from stepwrap.loops import LoopState, Phase
from stepwrap.runner.command.cli import main
from stepwrap.runner.finders.sweep import Setting, Sweep, TrialHook

SPACE = """\
optimizer.lr: {low: 1.0e-4, high: 0.1, log: true}
model:
  net.width: {low: 4, high: 16, step: 4}
data.train.batch_size: {choices: [4, 8]}
"""


def mistakes(text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the command's error about an invalid space."""
    Path("space.yaml").write_text(text)
    assert main(["sweep", "points.yaml", "--space", "space.yaml", *words]) == 2
    return capsys.readouterr().err


def test_all_mistakes_in_a_space_are_reported_with_their_lines(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = mistakes(
        "optimizer.lr: {low: 0.1, high: 1.0e-3}\n"
        "optimizer.eps: {lo: 1, high: 2}\n"
        "model.net.width: [4, 8]\n"
        "seed:\n  choices: []\n"
        "data.train.batch_size: {low: 2, high: 8, log: true, step: 2}\n"
        "train.max_epochs: {low: 0, high: 8, log: true}\n",
        capsys,
    )
    lines = [
        "space.yaml:1: optimizer.lr: low must be less than high, got 0.1 and 0.001",
        "space.yaml:2: optimizer.eps: lo is unknown; did you mean low or log?",
        "space.yaml:3: model.net.width: must be {low: ..., high: ...} or {choices: [...]}",
        "space.yaml:5: seed: choices must be a list of values, got []",
        "space.yaml:6: data.train.batch_size: log and step exclude each other",
        "space.yaml:7: train.max_epochs: log needs a low above 0, got 0",
    ]
    messages = text.splitlines()
    assert len(messages) == len(lines)
    assert all(map(str.startswith, messages, lines)), text


def test_the_config_must_accept_the_values(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = mistakes("optimizer.lrr: {low: 0.1, high: 0.2}\n", capsys)
    assert text.startswith("space.yaml:1: optimizer.lrr: ")
    assert "did you mean lr?" in text
    text = mistakes("optimizer.type: {choices: [AdamW, SDG]}\n", capsys)
    assert re.match(r"space\.yaml:1: optimizer\.type: .*you mean SGD", text)
    text = mistakes("", capsys)
    assert re.search(r"space\.yaml:1: .*must map settings", text)
    text = mistakes(SPACE, capsys, "--metric", "val/acuracy")
    assert "'acuracy'; did you mean accuracy?" in text
    assert main(["sweep", "points.yaml", "--space", "none.yaml"]) == 2
    assert re.search(r"none\.yaml .*read: No such file", capsys.readouterr().err)


def test_without_optuna_the_error_names_the_extra(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'stepwrap[sweep]'" in mistakes(SPACE, capsys)


def new_sweep(folder: Path, *, higher_is_better: bool = True) -> Sweep:
    space = {"optimizer.lr": Setting("space.yaml:1", {"choices": [0.1, [1, "a"]]})}
    goal = {"metric": "accuracy", "higher_is_better": higher_is_better}
    return Sweep(folder, space, **goal, seed=0)


def test_a_folder_keeps_one_sweep_and_repeats_interrupted_trials(tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    trial = sweep.next_trial()
    values = sweep.get_values(trial)
    assert values["optimizer.lr"] in (0.1, [1, "a"])
    # As after a killed sweep, which records no end of its trial.
    again = new_sweep(tmp_path)
    assert again.trials == []
    again.repeat_interrupted()
    repeated = again.next_trial()
    assert again.get_values(repeated) == values
    assert again.run_dir(repeated) == sweep.run_dir(trial) == tmp_path / "trial_0000"
    assert again.trials == []
    assert again.run_dir(again.next_trial()) == tmp_path / "trial_0002"
    with pytest.raises(ValueError, match="sweep with another mode"):
        new_sweep(tmp_path, higher_is_better=False)


def _judged(folder: Path, trial_id: int, value: float, prune: bool) -> str:
    """Validate at steps 10 and 20 of 30, and return the reason to stop."""
    state = LoopState(nn.Linear(1, 1), phase=Phase.VAL, max_steps=30)
    state.higher_is_better = {"accuracy": True}
    hook = TrialHook(folder, trial_id, "accuracy", prune=prune)
    for state.step in (10, 20):
        hook.on_eval_end(state, {"accuracy": value})
    return state.stop_reason


def test_all_ranks_stop_a_trial_that_is_worse_than_the_median(tmp_path: Path) -> None:
    sweep = new_sweep(tmp_path)
    study = sweep._study
    for _ in range(5):
        trial = sweep.next_trial()
        for step in (10, 20, 30):
            trial.report(0.8, step)
        study.tell(trial, 0.8)
    bad, good, pruned = (sweep.next_trial()._trial_id for _ in range(3))
    reason = "the sweep pruned the trial at accuracy 0.1"
    assert run_ranks(_judged, 2, tmp_path, bad, 0.1, True) == [reason] * 2
    assert run_ranks(_judged, 2, tmp_path, good, 0.9, True) == [""] * 2
    assert run_ranks(_judged, 2, tmp_path, pruned, 0.1, False) == [""] * 2
    marks = [trial.user_attrs.get("pruned") for trial in study.get_trials()]
    assert marks == [None] * 5 + [True, None, None]


@pytest.mark.slow
def test_a_sweep_on_two_ranks_continues_after_failed_trials(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    broken = "data.train.dataset.bad: {choices: [-1, 5]}\n"
    (tmp_path / "space.yaml").write_text(SPACE + broken)
    words = ["--trials", "3", "--nproc", "2", "train.max_epochs=1"]
    code, out, err = start("sweep", "points.yaml", "--space", "space.yaml", *words).finish()
    assert code == 0, out + err
    failed = re.findall(r"failed: ValueError: sample 5 is broken .*\(see (\S+)\)", out)
    assert 0 < len(failed) < 3
    assert "sample 5 is broken" in (tmp_path / failed[0]).read_text()
    assert f"3 trials: {3 - len(failed)} completed, 0 pruned, {len(failed)} failed" in out
    command = re.search(r"^train with its values: stepwrap (train .*)$", out, re.MULTILINE)[1]
    assert "--nproc=2" in command
    assert "data.train.dataset.bad=-1" in command
    best = Path(re.search(r"^best run: (.*)$", out, re.MULTILINE)[1])
    assert (tmp_path / best / "config.yaml").exists()
    # The same values, ranks and seed give the same result.
    assert start(*command.split(), "--run-dir", "again").finish()[0] == 0
    assert_identical(final_weights(tmp_path / best), final_weights(tmp_path / "again"))


@pytest.mark.slow
def test_it_continues_after_ctrl_c_and_a_kill(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    words = ["sweep", "points.yaml", "--space", "space.yaml", "--trials", "3"]
    words += ["data.train.dataset.pause_s=0.02", "hooks.checkpoint.every_steps=1"]
    folder = tmp_path / "sweeps" / "points"

    started = start(*words)
    started.wait_for(folder / "trial_0000", 1)
    started.process.send_signal(signal.SIGINT)
    code, out, err = started.finish()
    assert code == 130, out + err
    assert "0 trials: 0 completed, 0 pruned, 0 failed" in out
    assert re.search("0 failed\nstopped by Ctrl-C; .*--resume", out)

    second = start(*words, "--resume")
    second.wait_for(folder / "trial_0002", 1)
    second.process.kill()
    second.finish()

    code, out, err = start(*words).finish()
    assert code == 2
    assert re.search("sweeps/points already holds .*--resume", err)
    code, out, err = start(*words, "--resume").finish()
    assert code == 0, out + err
    assert "3 trials: 3 completed, 0 pruned, 0 failed" in out
    for name in ("trial_0000", "trial_0002"):
        assert "continuing from" in (folder / name / "output.txt").read_text()


FAILING = """
from stepwrap.loops import Hook


class FailsAtEnd(Hook):
    def on_train_end(self, state):
        raise ValueError("broken end")
"""


@pytest.mark.slow
def test_a_trial_that_fails_after_sigterm_does_not_count_as_stopped_by_ctrl_c(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "space.yaml").write_text(SPACE)
    words = ["sweep", "points.yaml", "--space", "space.yaml", "train.max_epochs=500"]
    words += ["data.train.dataset.pause_s=0.02", "hooks.failing.type=failing.FailsAtEnd"]
    command = start(*words)
    command.wait_for(tmp_path / "sweeps" / "points" / "trial_0000", 1)
    command.process.send_signal(signal.SIGTERM)
    code, out, err = command.finish()
    assert code == 143, out + err
    assert re.search("0 failed\nstopped by SIGTERM; .*--resume", out)
