"""Commands in processes of their own, none of which outlives its test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runner_parts import Command, write_run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `stepwrap ...` in a folder that holds the small run `points.yaml`."""
    write_run(tmp_path)
    commands: list[Command] = []

    def start_one(*words: str | Path) -> Command:
        commands.append(Command(*words, cwd=tmp_path))
        return commands[-1]

    yield start_one
    for command in commands:
        command.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder that holds the small run; returns it."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    # What the command adds to the import path and the modules is gone after the test.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "points", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder of the test's own: two runs at a time may not share a run folder."""
    monkeypatch.chdir(tmp_path)
