"""URLs where a file or folder of this machine is required; test_runner_remote_* has the others."""

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
from stepwrap.runner import export_model
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import SingleDevice, SupervisedModel

URL = "s3://bucket/x"
COMMANDS = {
    "RUN_A": "compare runs URL",
    "RUNS_DIR": "serve URL",
    "RUN_DIR": "replay URL --step 1",
    "DIR": "init URL",
    "CONFIG": "check URL",
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
    assert main(["init", "file:///tmp/x"]) == 2
    assert "file:///tmp/x: write /tmp/x" in capsys.readouterr().err
    assert sorted(run.iterdir()) == files


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "an own loop": lambda model: LoopState(SingleDevice(model), run_dir=Path(URL)),
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
