"""The number of files that a config's value passes from the text to the object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import stepwrap.runner.command.run_commands  # noqa: F401
from stepwrap.runner.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT}/{folder}/" for folder in ("registry", "runner", "wrappers", "loops"))
RATE = 0.00123


class Arrived(torch.optim.SGD):
    """End the run when the value has arrived."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        sys.setprofile(None)
        raise ValueError(f"the rate is {lr}")


def get_parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, partial):
        yield from (value.args, value.keywords)
    elif isinstance(value, SimpleNamespace) or type(value).__module__.startswith(
        ("stepwrap.registry", "stepwrap.runner")
    ):
        yield from getattr(value, "__dict__", {}).values()


def holds(value: object, depth: int = 0) -> bool:
    if isinstance(value, float | str):
        return str(RATE) in str(value)
    return depth < 9 and any(holds(child, depth + 1) for child in get_parts(value))


def test_a_value_passes_few_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrived = f"optimizer: {{_delete_: true, type: {__name__}.Arrived, lr: {RATE}}}"
    (run / "lr.yaml").write_text(f"_base_: points.yaml\n{arrived}\n")
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        """Record the file of a function that takes or returns the value, also inside an object."""
        code = frame.f_code
        name = code.co_filename
        if event not in ("call", "return") or name in files or not name.startswith(OURS):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if holds(arguments if event == "call" else argument):
            files.add(name)

    assert main(["check", "points.yaml"]) == 0
    sys.setprofile(note)
    try:
        assert main(["train", "lr.yaml"]) == 2
    finally:
        sys.setprofile(None)
    assert f"the rate is {RATE}" in capsys.readouterr().err
    names = sorted(file.removeprefix(f"{ROOT}/") for file in files)
    assert "registry/text/files.py" in names
    assert len(names) <= 20, names
