"""`stepwrap predict` and `Runner.predict` write the outputs of the evaluated model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runner_parts import Command, run_command
from torch import nn
from torch.utils.data import TensorDataset

from stepwrap.loops import Hook, IterTrainLoop, LoopState, TestLoop, build_loader
from stepwrap.runner import Runner, load_model
from stepwrap.runner.command.cli import main
from stepwrap.wrappers import OptimWrapper, SupervisedModel

Capture = pytest.CaptureFixture[str]
EMA = "hooks.ema={type: EMAHook, decay: 0.9}"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _scores(model: nn.Module, size: int) -> list[list[float]]:
    from points import Points  # The user's module, which the command has imported.

    with torch.inference_mode():
        return model(Points(size).inputs, mode="tensor").tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("nproc", [1, 3])
def test_predictions_equal_the_evaluated_models(nproc: int, run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml", EMA]) == 0
    capsys.readouterr()
    words = ["predict", "runs/points", "--out", "out/predictions.jsonl"]
    assert run_ranks(run_command, nproc, run, *words) == [0] * nproc
    lines = _lines(run / "out/predictions.jsonl")
    assert [line["index"] for line in lines] == list(range(21))
    # With EMAHook evaluations use the averages.
    scores = torch.tensor([line["preds"] for line in lines])
    torch.testing.assert_close(scores, torch.tensor(_scores(load_model("runs/points"), 21)))
    records = _lines(run / "runs/points/metrics.jsonl")
    tested = next(record for record in records if record["phase"] == "test")
    correct = [line["preds"][1] > line["preds"][0] for line in lines]
    correct = [
        predicted == bool(line["target"]) for predicted, line in zip(correct, lines, strict=True)
    ]
    assert sum(correct) / 21 == pytest.approx(tested["accuracy"], abs=1e-6)
    assert records == _lines(run / "runs/points/metrics.jsonl")


def test_checkpoint_and_data_can_be_chosen(run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml"]) == 0
    capsys.readouterr()
    (run / "more.yaml").write_text("dataset: {type: points.Points, size: 30}\nbatch_size: 7\n")
    (run / "val.more.yaml").write_text((run / "more.yaml").read_text())
    files = (("more.yaml", 30), ("val.more.yaml", 30))
    for data, size in (("val", 20), ("train", 48), ("test", 21), *files):
        words = ["--data", data, "--out", f"{data}.npz", "--checkpoint", "latest"]
        assert main(["predict", "points.yaml", *words]) == 0
        out = capsys.readouterr().out
        assert f"predictions: {size} samples in {data}.npz" in out
        assert out.startswith("predict epoch 4 step 48 done\n")
        assert "checkpoint: runs/points/checkpoints/step_00000048" in out
        expected = _scores(load_model("runs/points", "latest"), size)
        with np.load(run / f"{data}.npz") as arrays:
            np.testing.assert_allclose(arrays["preds"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("deadly", ["deadly=true", "deadly=false"])
def test_a_rank_that_fails_leaves_nothing_behind(
    deadly: str, start: Callable[..., Command], tmp_path: Path
) -> None:
    code, _, err = start("train", "points.yaml", "train.max_epochs=1").finish()
    assert code == 0, err
    before = sorted(tmp_path.iterdir())
    bad = [f"data.test.dataset.{setting}" for setting in ("bad=19", "bad_rank=1", deadly)]
    words = ("--nproc=3", "--out=p.jsonl", "data.test.batch_size=1")
    code, _, err = start("predict", "runs/points", *words, *bad).finish()
    assert code == 1
    assert ("SIGKILL" if deadly == "deadly=true" else "sample 19 is broken") in err
    assert deadly == "deadly=true" or "batch 7 of the prediction" in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "stepwrap predict: Missing option '--out'."),
        (["--out", "p.npz", "--data", "other.yaml"], "--data: other.yaml has no data.test"),
        (["--out", "p.npz", "--data", "empty.yaml"], "--data: empty.yaml has no data.test"),
        (
            ["--out", "p.npz", "data.test=null"],
            "no data.test; choose other data with --data",
        ),
        (["--out", "p.csv"], "--out: predictions are written to files that end in .jsonl, .par"),
        (["--out", "points.npz"], "--out: predictions need a new file, and points.npz exists"),
        (["--out", "p.npz", "--data", "tset"], "no such section of data; did you mean test?"),
        (["--out", "p.npz", "--data", "nowhere"], "the config file nowhere does not exist"),
        (
            ["--out", "p.npz", "--checkpoint", "bset"],
            "checkpoint bset does not exist in runs/points; did you mean best",
        ),
    ],
)
def test_mistakes(words: list[str], message: str, run: Path, capsys: Capture) -> None:
    (run / "points.npz").touch()
    (run / "empty.yaml").write_text("data:")
    (run / "other.yaml").write_text("data: {val: {dataset: {type: points.Points}}}")
    assert main(["predict", "points.yaml", *words]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (run / "p.npz").exists()


def test_data_that_is_shuffled_is_refused(run: Path, capsys: Capture) -> None:
    assert main(["train", "points.yaml"]) == 0
    words = ["--out", "p.npz", "data.test.shuffle=true"]
    assert main(["predict", "points.yaml", *words]) == 1
    assert re.search("once .*in order, .*has shuffle", capsys.readouterr().err)


def test_objects(tmp_path: Path) -> None:
    model = SupervisedModel(nn.Linear(2, 3), nn.CrossEntropyLoss())
    data = TensorDataset(torch.rand(5, 2), torch.zeros(5, dtype=torch.long))
    loader = build_loader(data, batch_size=2)
    path = tmp_path / "predictions.jsonl"
    assert Runner(model, test_loop=TestLoop(loader), hooks=()).predict(path) == 5
    expected = model.net(data.tensors[0])
    torch.testing.assert_close(torch.tensor([line["preds"] for line in _lines(path)]), expected)
    other = tmp_path / "other.jsonl"
    assert Runner(model, hooks=()).predict(other, loader=loader) == 5
    assert other.read_text() == path.read_text()
    with pytest.raises(ValueError, match="requires a loader or test_loop"):
        Runner(model, hooks=()).predict(tmp_path / "none.jsonl")


class Stops(Hook):
    def on_update(self, state: LoopState) -> None:
        state.request_stop("one update is enough")


def test_a_stopped_training_does_not_stop_predictions(tmp_path: Path) -> None:
    model = SupervisedModel(nn.Linear(2, 3), nn.CrossEntropyLoss())
    data = TensorDataset(torch.rand(5, 2), torch.zeros(5, dtype=torch.long))
    loader = build_loader(data, batch_size=2)
    runner = Runner(
        model,
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)),
        train_loop=IterTrainLoop(loader, max_steps=100),
        hooks=[Stops()],
    )
    runner.train()
    assert runner.state.step == 1
    path = tmp_path / "predictions.jsonl"
    assert runner.predict(path, loader=loader) == len(_lines(path)) == 5
