"""Which checkpoint a name or a path stands for, in every command and in Python."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from runner_parts import write_run

from stepwrap.loops import CheckpointError, load_checkpoint
from stepwrap.registry import ConfigError
from stepwrap.runner import Runner, load_model, load_weights
from stepwrap.runner.command.cli import main

Capture = pytest.CaptureFixture[str]
NAME = "step_00000012"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs, and return the folder with their folders."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("train", str(write_run(folder)), "train.max_epochs=1", "data.test=null")
    words += ("hooks.progress=false", "hooks.checkpoint.every_steps=null")
    # A module of this name from another test's folder may have been imported here.
    sys.modules.pop("points", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for seed, name in enumerate(("ours", "other")):
            assert main([*words, f"seed={seed}", "--run-dir", str(folder / name)]) == 0
    sys.modules.pop("points", None)
    return folder


@pytest.fixture
def ours(trained: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a run's folder; change into the folder of another run's checkpoints."""
    for name in ("ours", "other"):
        shutil.copytree(trained / name, run / name)
    monkeypatch.chdir(run / "other/checkpoints")
    return run / "ours"


def test_a_name_is_a_checkpoint_of_the_run(ours: Path, capsys: Capture) -> None:
    config, checkpoint = str(ours / "config.yaml"), f"{ours}/checkpoints/{NAME}"
    capsys.readouterr()
    for command in ("validate", "export", "predict"):
        out = ["--out", f"{command}.npz"] if command == "predict" else []
        out = ["--out", "model.safetensors"] if command == "export" else out
        data = ["--data", "val"] if command == "predict" else []
        assert main([command, config, "--checkpoint", NAME, *out, *data]) == 0
        if command != "export":
            assert f"checkpoint: {checkpoint}\n" in capsys.readouterr().out
    weights = load_checkpoint(checkpoint).read("model")
    model = load_model(ours, NAME)
    for words in ([], ["--without-step", "20"]):
        folder = ours if not words else shutil.copytree(ours, ours.with_name("copy"))
        more = ["train.max_epochs=2", "--run-dir", str(folder)]
        assert main(["train", config, "--resume", NAME, *words, *more]) == 0
        assert f"continuing from {folder}/checkpoints/{NAME}, step 12" in capsys.readouterr().err
    runner = Runner.from_config(config)
    runner.validate(NAME)
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(runner.state.model.module.state_dict()[name], tensor)


def test_another_runs_checkpoint_needs_a_path(ours: Path, capsys: Capture) -> None:
    config, folder = str(ours / "config.yaml"), ours / "checkpoints"
    (folder / NAME).rename(folder / "step_00000012-3")
    local_copy = Path(NAME).absolute()
    capsys.readouterr()
    words = ["train", config, "train.max_epochs=2", "--resume"]
    for command in (
        words,
        [*words[:-1], "--without-step=20", "--resume"],
        ["validate", config, "--checkpoint"],
    ):
        assert main([*command, NAME]) == 1
        text = capsys.readouterr().err
        assert f"checkpoint {NAME} does not exist in {ours}" in text
        assert re.search(rf"for {local_copy}, .*another run .*write \./{NAME}", text)
    with pytest.raises(CheckpointError, match=rf"write \./{NAME}"):
        Runner.from_config(config).train(resume=NAME)
    with pytest.raises(CheckpointError, match=rf"write \./{NAME}"):
        load_model(ours, NAME)
    with pytest.raises(CheckpointError, match="did you mean step_00000012-3"):
        load_model(ours, "step_00000012-4")
    # A text with a slash, and a Path, are paths.
    weights = load_checkpoint(local_copy).read("model")
    for which in (f"./{NAME}", Path(NAME), str(local_copy), "../../other", Path("../../other")):
        model = load_model(ours, which)
        assert all(torch.equal(model.state_dict()[name], one) for name, one in weights.items())
    assert main([*words, f"./{NAME}"]) == 0
    assert f"continuing from {NAME}, step 12" in capsys.readouterr().err


def test_the_folder_of_another_run(
    ours: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, other = str(ours / "config.yaml"), ours.with_name("other")
    words = [f"{other}/config.yaml", "train.max_epochs=2", "optimizer.lr=0"]
    assert main(["train", *words, "--resume", "hooks.checkpoint.keep_best=null"]) == 0
    monkeypatch.chdir(ours.parent)
    capsys.readouterr()
    # The first checkpoint is the best one. A resume continues from the latest.
    for which in ("other", "./other", str(other)):
        assert main(["validate", config, "--checkpoint", which]) == 0
        assert f"other/checkpoints/{NAME}\n" in capsys.readouterr().out
    assert main(["train", config, "--run-dir=new", "--resume=other", "train.max_epochs=3"]) == 0
    assert "continuing from other/checkpoints/step_00000024, step 24" in capsys.readouterr().err
    # load_from has no run whose folder a name could be in: each text is a path.
    model = load_model(ours)
    load_weights(model, "other")
    best = load_checkpoint(other / "checkpoints" / NAME).read("model")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in best.items())
    assert main(["check", config, f"load_from={NAME}"]) == 2
    assert re.search("load_from takes a path.* runs/my_run", capsys.readouterr().err)
    with pytest.raises((CheckpointError, ConfigError), match="load_from takes a path"):
        load_weights(model, "best")
