"""Fixtures that run commands in separate processes and end them with the test."""

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
    """Change into a folder with the small run, and return it."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Undo what the command adds to the import path and the modules.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "points", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a separate folder: two simultaneous runs must not share a run folder."""
    monkeypatch.chdir(tmp_path)
