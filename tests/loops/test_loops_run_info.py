"""The hook `run_info` writes a run's parameters, warnings, errors and times."""

import json
import logging
import math
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import spiky_runs
import torch
from loop_parts import make_loader, make_state
from marks import slow
from ranks import run_ranks
from runner_parts import points_config, run_command, write_run
from warm import ended, run

from stepwrap.collectives import get_rank
from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    Hook,
    HookList,
    LoggerHook,
    LogHook,
    LoopState,
    RunInfoHook,
    SpikeGuardHook,
    ThroughputHook,
    ValLoop,
)
from stepwrap.runner import Runner


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def events(folder: Path) -> list[tuple[str, int, int, str]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(row["event"], row["step"], row["rank"], row["text"]) for row in rows]


class Warner(Hook):
    def on_update(self, state: LoopState) -> None:
        if state.step in (2, 3):
            logging.getLogger("stepwrap.somewhere").warning("rank %d is slow", get_rank())
        if state.step == 4:
            warnings.warn("too hot", RuntimeWarning, stacklevel=1)


def train(folder: Path, *hooks: Any) -> None:
    state = make_state(run_dir=folder)
    EpochTrainLoop(make_loader(), max_epochs=2, log_every_steps=2).run(
        state, HookList([RunInfoHook(), *hooks])
    )


def train_with_warnings(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        train(folder, Warner())


def test_warnings_of_all_ranks_are_recorded_with_their_step(tmp_path: Path) -> None:
    run_ranks(train_with_warnings, 3, tmp_path)
    recorded = events(tmp_path)
    assert recorded[0] == ("start", 0, 0, "")
    # A repeated text counts once.
    assert sorted(event for event in recorded if event[0] == "warning") == sorted(
        event
        for rank in range(3)
        for event in (
            ("warning", 2, rank, f"rank {rank} is slow"),
            ("warning", 4, rank, "RuntimeWarning: too hot"),
        )
    )
    assert ("end", 4, 0, "") in recorded


CODE = """
import logging, warnings
from pathlib import Path
from torch import nn
from stepwrap.loops import LoopState, RunInfoHook

before = warnings.showwarning
hook = RunInfoHook()
state = LoopState(model=nn.Linear(1, 1), optim_wrapper=None, run_dir=Path())
hook.on_run_start(state)
logging.getLogger("stepwrap.somewhere").warning("too slow")
warnings.warn("too hot", RuntimeWarning)
hook.on_run_end(state)
assert warnings.showwarning is before
"""


@pytest.mark.slow
def test_recorded_warnings_are_still_shown(tmp_path: Path) -> None:
    """Without a handler Python prints the warnings of a library."""
    done = ended("-c", CODE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("too slow") == 1
    assert done.stderr.count("RuntimeWarning: too hot") == 1
    assert len(events(tmp_path)) == 2


class Failing(Hook):
    def on_update(self, state: LoopState) -> None:
        if state.step == 3:
            raise ValueError("broken")


def test_an_error_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        train(tmp_path, Failing())
    assert events(tmp_path) == [("start", 0, 0, ""), ("error", 3, 0, "ValueError: broken")]


def test_times_add_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    state = make_state(run_dir=tmp_path)
    hooks = [RunInfoHook(), ThroughputHook(), LogHook(), CheckpointHook(every_steps=1)]
    loop = EpochTrainLoop(
        make_loader(), max_epochs=2, val_loop=ValLoop(make_loader()), log_every_steps=3
    )
    start_s = perf_counter()
    loop.run(state, HookList(hooks))
    elapsed_s = perf_counter() - start_s
    seconds = content(tmp_path / "phases.json")
    assert set(seconds) == {"training", "evaluation", "data", "hooks", "checkpoint"}
    assert all(value > 0 for value in seconds.values())
    assert seconds["checkpoint"] < seconds["hooks"]
    assert seconds["hooks"] + seconds["data"] < seconds["training"]
    assert seconds["training"] + seconds["evaluation"] < elapsed_s


@pytest.mark.parametrize(
    ("words", "mesh", "shares"),
    [
        (("wrapper={type: ddp}",), {"data": 2}, (1.0, 1.0)),
        *slow(
            (("wrapper={type: fsdp}",), {"data": 2}, (0.5, 0.5)),
            (
                (
                    "mesh={data: 1, tensor: 2}",
                    "tensor_parallel={plan: {net.0: colwise, net.3: rowwise}}",
                ),
                {"data": 1, "tensor": 2},
                (0.5, 0.5),
            ),
        ),
    ],
)
def test_the_parameters_on_each_rank(
    words: tuple[str, ...], mesh: dict[str, int], shares: tuple[float, float], tmp_path: Path
) -> None:
    write_run(tmp_path)
    common = ("train", "points.yaml", "--run-dir", "run", "--limit-batches", "1")
    short = ("train.max_epochs=1", "hooks.checkpoint=false", "hooks.progress=false")
    assert run_ranks(run_command, 2, tmp_path, *common, *short, *words) == [0, 0]
    facts = content(tmp_path / "run" / "environment.json")
    assert facts["mesh"] == mesh
    assert facts["torch"] == torch.__version__
    assert (facts["hosts"], facts["model"]) == (1, "SupervisedModel")
    # 2 x 8 weights and 8 biases; 8 x 2 weights and 2 biases.
    assert facts["groups"] == {"net.0": 24, "net.3": 18}
    assert facts["parameters"] == facts["trainable"] == 42
    for rank, share in zip(facts["ranks"], shares, strict=True):
        assert rank["held"]["net.0"] == pytest.approx(24 * share)
        assert rank["host"] == 0
        assert rank["device"] == "cpu"


@pytest.mark.slow
def test_the_origins_of_settings_survive_a_resume(tmp_path: Path) -> None:
    write_run(tmp_path)
    config = points_config(tmp_path, f"run_dir={tmp_path / 'run'}", "train.max_epochs=1")
    Runner.from_config(config).train()
    origins = content(tmp_path / "run" / "origins.json")
    assert origins["optimizer.lr"].endswith("points.yaml:7")
    assert origins["train.max_epochs"] == "override train.max_epochs=1"
    run(
        *("-m", "stepwrap.runner", "train", "run/config.yaml", "--resume", "train.max_epochs=2"),
        cwd=tmp_path,
    )
    resumed = content(tmp_path / "run" / "origins.json")
    assert resumed["optimizer.lr"] == origins["optimizer.lr"]
    assert resumed["train.max_epochs"] == "override train.max_epochs=2"


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    state = make_state()
    assert state.run_dir is None
    EpochTrainLoop(make_loader(), max_epochs=1).run(state, HookList([RunInfoHook()]))
    assert list(tmp_path.iterdir()) == []


class Closed(LoggerHook):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[bool] = []

    def close(self, failed: bool) -> None:
        self.ends.append(failed)


def test_a_rollback_is_not_an_error(tmp_path: Path) -> None:
    wild = {spiky_runs.sample_at(12, 0, 1): math.nan}
    saver, closed = CheckpointHook(every_steps=5, every_epochs=None), Closed()
    hooks = [SpikeGuardHook(before=4), saver, RunInfoHook(), closed]
    state = spiky_runs.make_state(run_dir=tmp_path)
    assert spiky_runs.train(state, spiky_runs.Spiky(80, wild), hooks).step == 20
    recorded = events(tmp_path)
    assert [event for event, *_ in recorded if event in ("error", "end")] == ["end"]
    assert closed.ends == [False, False]
