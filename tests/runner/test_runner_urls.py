"""URLs where a file or folder of this machine is required."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepwrap.loops import (
    LoopState,
    PredictionHook,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from stepwrap.runner import Runner, export_model, load_model, load_weights
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import SingleDevice, SupervisedModel

URL = "s3://bucket/x"
COMMANDS = {
    "run_dir": "train points.yaml run_dir=URL",
    "--run-dir": "train points.yaml --run-dir URL",
    "load_from": "check points.yaml load_from=URL",
    "load_from.path": "train points.yaml load_from.path=URL",
    "resume": "train points.yaml resume=URL",
    "--resume": "train points.yaml --resume URL",
    "--checkpoint": "validate points.yaml --checkpoint=URL",
    "--out": "predict points.yaml --out URL.npz",
    "'--out'": "export points.yaml --out URL.pt2",
    "RUN_DIR": "report URL",
    "'--out': ": "report runs --out URL.html",
    "RUN_A": "compare runs URL",
    "RUNS_DIR": "serve URL",
    "DIR": "init URL",
    "CONFIG": "train URL.yaml",
    "'--run-dir'": "verify-resume points.yaml --run-dir URL",
    "'--folder'": "sweep points.yaml --space points.yaml --folder URL",
}


def test_commands_refuse_urls_before_any_work(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(run.iterdir())
    for name, words in COMMANDS.items():
        assert main(words.replace("URL", URL).split()) == 2
        text = capsys.readouterr().err
        assert name in text
        assert re.search(f"path on this machine, .*{URL}", text)
    assert main(["train", "points.yaml", "run_dir=file:///tmp/x"]) == 2
    assert "file:///tmp/x: write /tmp/x" in capsys.readouterr().err
    assert sorted(run.iterdir()) == files


class Loop:
    def run(self, state: Any, hooks: Any) -> Any:
        raise AssertionError


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "run_dir": lambda model: Runner(model, run_dir=URL),
    "a Path": lambda model: Runner(model, run_dir=Path(URL)),
    "an own loop": lambda model: LoopState(SingleDevice(model), run_dir=Path(URL)),
    "resume": lambda model: Runner(model, test_loop=Loop(), run_dir="runs").test(URL),
    "load_model": lambda model: load_model(URL),
    "its checkpoint": lambda model: load_model("runs", URL),
    "load_weights": lambda model: load_weights(model, URL),
    "save": lambda model: save_checkpoint(URL, LoopState(SingleDevice(model))),
    "load": lambda model: load_checkpoint(URL),
    "find": lambda model: find_checkpoint(URL),
    "predict": lambda model: PredictionHook(f"{URL}.npz", []),
    "export": lambda model: export_model(model, f"{URL}.pt2", torch.rand(2, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_python_refuses_urls(name: str, tmp_path: Path) -> None:
    model = SupervisedModel(nn.Linear(2, 2), nn.CrossEntropyLoss())
    with pytest.raises((ValueError, RuntimeError), match=f"got the URL {URL}"):
        CALLS[name](model)
    assert not list(tmp_path.iterdir())
