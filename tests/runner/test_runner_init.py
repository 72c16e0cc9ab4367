"""`stepwrap init`: the project that it creates runs at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warm import ended, run

from stepwrap.registry import load_config
from stepwrap.runner.command.cli import main

FILES = {".gitignore", "README.md", "config.yaml", "data.py", "model.py", "test_model.py"}


def test_it_writes_a_project_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "first/spirals"]) == 0
    folder = tmp_path / "first" / "spirals"
    assert {file.name for file in folder.iterdir()} == FILES
    assert load_config(folder / "config.yaml")["name"] == "spirals"
    assert "cd first/spirals && stepwrap train config.yaml" in capsys.readouterr().out
    (folder / "model.py").write_text("mine")
    assert main(["init", "first/spirals"]) == 2
    assert "first/spirals already has config.yaml, model.py" in capsys.readouterr().err
    assert (folder / "model.py").read_text() == "mine"


def test_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "two words"]) == 2
    assert re.search("got 'two words'; .*--name", capsys.readouterr().err)
    assert not (tmp_path / "two words").exists()
    assert main(["init", "two words", "--name", "two"]) == 0
    assert load_config(tmp_path / "two words" / "config.yaml")["name"] == "two"
    assert main(["init", "2024"]) == 0
    assert load_config(tmp_path / "2024" / "config.yaml")["name"] == "2024"
    assert main(["init"]) == 2
    assert "DIR is missing" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["init", "file"]) == 2
    assert "file cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_project_trains_and_its_tests_pass(tmp_path: Path) -> None:
    run("-m", "stepwrap.runner", "init", "spirals", cwd=tmp_path)
    folder = tmp_path / "spirals"
    out = run("-m", "stepwrap.runner", "train", "config.yaml", cwd=folder)
    accuracy = re.findall(r"accuracy *\S* *([01]\.\d+)", out)[-1]
    assert float(accuracy) > 0.9
    assert {"config.yaml", "checkpoints", "metrics.jsonl"} <= {
        file.name for file in (folder / "runs" / "spirals").iterdir()
    }
    done = ended("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
