"""Using a run folder later: from another folder, with fewer modules, after an error."""

import re
import sys
from pathlib import Path

import pytest
import torch
from marks import slow
from torch import nn
from torch.utils.data import TensorDataset

from stepwrap.loops import CheckpointHook, EpochTrainLoop, build_loader
from stepwrap.registry import ConfigError, load_config
from stepwrap.runner import Runner, load_model
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import OptimWrapper, SupervisedModel

TRAIN = ("train", "points.yaml", "hooks.progress=false", "train.max_epochs=1")
# A config can import points.py from the working directory, or use dotted names.
IMPORTED, DOTTED = "imports=[points]", "imports=[]"


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def train_and_leave(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train in one folder, remove its modules, change to another; return the run's folder."""
    # Other tests have modules of this name, too.
    before = [path for path in sys.path if not Path(path, "points.py").exists()]
    assert main([*TRAIN, IMPORTED]) == 0
    monkeypatch.setattr(sys, "path", before)
    sys.modules.pop("points")
    (run / "elsewhere").mkdir()
    monkeypatch.chdir(run / "elsewhere")
    return run / "runs/points"


@pytest.mark.slow
def test_a_failed_resume_leaves_the_run_as_it_was(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN]) == 0
    before = files_in(run / "runs")
    assert main([*TRAIN, "--resume", "model.net.width=12"]) == 1
    err = capsys.readouterr().err
    assert re.search(r"shape \(8, 2\) .*checkpoint, \(12, 2\) .*model", err)
    assert files_in(run / "runs") == before
    assert load_model("runs/points").net[0].out_features == 8
    assert main(["validate", "runs/points/config.yaml"]) == 0
    assert main(["train", "runs/points/config.yaml", "--resume", "train.max_epochs=2"]) == 0
    assert load_config("runs/points/config.yaml").select("train.max_epochs") == 2


@pytest.mark.parametrize("how", [DOTTED, *slow(IMPORTED)])
def test_a_run_folder_remembers_where_its_modules_are(
    how: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(sys.path)
    assert main([*TRAIN, how]) == 0
    folder = run / "runs/points"
    assert load_config(folder / "config.yaml").select("import_from") == [str(run)]
    (run / "elsewhere").mkdir()
    monkeypatch.chdir(run / "elsewhere")
    for use in (
        lambda: main(["validate", str(folder / "config.yaml")]),
        lambda: main(["test", str(folder / "config.yaml")]),
        lambda: load_model(folder).training,
        lambda: Runner.from_config(folder / "config.yaml").validate("latest") == {},
        lambda: main(
            ["train", str(folder / "config.yaml"), "--resume", "hooks.checkpoint.every_epochs=1"]
        ),
    ):
        monkeypatch.setattr(sys, "path", list(before))
        sys.modules.pop("points")
        assert not use()
    assert list(Path().iterdir()) == []


def test_a_run_folder_may_be_moved(
    train_and_leave: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = train_and_leave.rename(train_and_leave.with_name("old"))
    assert main(["validate", str(moved / "config.yaml")]) == 0
    assert f"checkpoint: {moved}/checkpoints/" in capsys.readouterr().out
    assert main(["validate", str(moved / "config.yaml"), "--run-dir", "other"]) == 1


def test_modules_of_the_working_directory_come_first(train_and_leave: Path) -> None:
    Path("points.py").write_text("Net = None\n")
    with pytest.raises(ConfigError, match=r"points\.Net"):
        load_model(train_and_leave)
    assert str(train_and_leave.parents[1]) not in sys.path


def test_a_folder_without_the_modules_is_not_used(train_and_leave: Path) -> None:
    (train_and_leave.parents[1] / "points.py").rename(train_and_leave.parents[1] / "others.py")
    where = (
        rf"points was not found in {Path.cwd()}; run this from the folder that contains points\.py"
    )
    with pytest.raises(ConfigError, match=where):
        load_model(train_and_leave)
    assert str(train_and_leave.parents[1]) not in sys.path


def test_the_model_needs_neither_data_nor_metrics(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "samples.py").write_text("from points import Points\n")
    (run / "scores.py").write_text("from stepwrap.loops import MeanLoss as Score\n")
    more = [f"data.{name}.dataset.type=samples.Points" for name in ("train", "val", "test")]
    more += ["imports=[points, samples]", "metrics.loss.type=scores.Score"]
    assert main([*TRAIN, *more]) == 0
    weight = load_model("runs/points").net[0].weight
    (run / "samples.py").write_text("import a_missing_package\n")
    (run / "scores.py").unlink()
    monkeypatch.delitem(sys.modules, "samples")
    monkeypatch.delitem(sys.modules, "scores")
    assert torch.equal(load_model("runs/points").net[0].weight, weight)
    (run / "points.py").write_text("import another_missing_package\n")
    monkeypatch.delitem(sys.modules, "points")
    with pytest.raises(ConfigError) as caught:
        load_model("runs/points")
    text = str(caught.value)
    assert re.search(r"model\.net\.type: points .*imported: ModuleNotFoundError", text)
    assert "metrics" not in text


def test_a_runner_of_objects_shows_how_to_load_its_model(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return SupervisedModel(nn.Linear(2, 2), nn.CrossEntropyLoss())

    model = build()
    data = TensorDataset(torch.ones(4, 2), torch.ones(4).long())
    Runner(
        model,
        EpochTrainLoop(build_loader(data, batch_size=4, train=True), max_epochs=1),
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        hooks=[CheckpointHook()],
        run_dir=tmp_path,
    ).train()
    with pytest.raises(FileNotFoundError, match="built from objects") as caught:
        load_model(tmp_path)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    names = {"build": build}
    exec("\n".join(lines).replace("...", "build()"), names)
    assert torch.equal(names["model"].net.weight, model.net.weight)


def test_a_runner_of_settings_leaves_a_config(run: Path) -> None:
    words = ("hooks.progress=false", "train.max_epochs=1")
    settings = load_config("points.yaml", words).to_dict()
    for source in (settings, load_config("points.yaml", words)):
        model = Runner.from_config({**source, "run_dir": "own"}).train(resume=True).model.module
        assert torch.equal(load_model("own", "latest").net[0].weight, model.net[0].weight)
        assert load_config("own/config.yaml").select("import_from") == [str(run)]
