"""Models with the interface of torchvision's detectors: training, predictions and exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric
from weights import apart, whole_weights

from stepwrap.registry import config_from_dict, dump_config
from stepwrap.runner import Runner, load_model
from stepwrap.runner.command.cli import main

Capture = pytest.CaptureFixture[str]
BATCH = 6


class Detector(nn.Module):
    """Scores the nine cells of an image, and finds a box in those with a high score."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 5)
        self.to(torch.float64)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        cells = [self._cells(image) for image in images]
        if self.training:
            assert targets is not None
            pairs = list(zip(cells, targets, strict=True))
            boxes = [(c[:, :4].mean(0) - t["boxes"].sum(0)).square().mean() for c, t in pairs]
            scores = [(c[:, 4].mean() - len(t["boxes"])).square() for c, t in pairs]
            return {"loss_box_reg": torch.stack(boxes).mean(),
                    "loss_objectness": torch.stack(scores).mean()}  # fmt: skip
        return [
            {"boxes": c[mask, :4], "scores": c[mask, 4], "labels": mask.nonzero()[:, 0]}
            for c in cells
            for mask in [c[:, 4] > c[:, 4].mean()]
        ]

    def _cells(self, image: Tensor) -> Tensor:
        features = nn.functional.adaptive_avg_pool2d(self.body(image).relu(), 3)
        cells: Tensor = self.head(features.flatten(1).T)
        return cells


class Shapes(Dataset[Any]):
    """Images of different sizes with 0 to 2 boxes."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*sizes: int) -> Tensor:
            return torch.rand(*sizes, generator=generator, dtype=torch.float64)

        self.samples = [
            (random(3, 6 + at % 3, 7), {"boxes": random(at % 3, 4), "labels": torch.ones(at % 3)})
            for at in range(size)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Scores(Metric):
    """Has lists of tensors of different lengths as its state, like MeanAveragePrecision."""

    full_state_update = False
    scores: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx=None)
        self.add_state("targets", [], dist_reduce_fx=None)

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        self.scores += [prediction["scores"] for prediction in preds]
        self.targets += [labels["labels"] for labels in target]

    def compute(self) -> dict[str, Tensor]:
        scores = torch.cat(self.scores)
        return {"sum": scores.sum(), "found": torch.tensor(len(scores)),
                "boxes": torch.cat(self.targets).sum()}  # fmt: skip


def make_config(ranks: int, **sections: Any) -> dict[str, Any]:
    lists = {"batch_size": BATCH // ranks, "collate": "stepwrap.loops.keep_lists"}
    test = {"dataset": {"type": Shapes, "size": 7}, **lists}
    return {
        "model": {"type": Detector},
        "device": "cpu",
        "wrapper": {"type": "single" if ranks == 1 else "ddp"},
        "optimizer": {"type": "AdamW", "lr": 0.01},
        "data": {
            "train": {"dataset": {"type": Shapes, "size": 12}, **lists},
            "val": test,
            "test": test,
        },
        "train": {"type": "EpochTrainLoop", "max_epochs": 2},
        "metrics": {"scores": {"type": Scores}},
        "hooks": {"progress": False, "log": False},
        "run_dir": "runs/shapes",
        **sections,
    }


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Train, write predictions, and return the weights and metrics."""
    runner = Runner.from_config(config)
    runner.train()
    for suffix in ("jsonl", "parquet"):
        assert runner.predict(f"predictions.{suffix}", checkpoint="latest") == 7
    results = {"weights": whole_weights(runner.state.model.module), "val": runner.state.metrics}
    with pytest.raises(ValueError, match=r"no field .*\.jsonl or \.parquet"):
        runner.predict("predictions.npz")
    return results


def train_plainly(config: dict[str, Any]) -> Detector:
    torch.manual_seed(0)
    net = Detector()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    samples = Shapes(12).samples
    for at in [*range(0, 12, BATCH)] * config["train"]["max_epochs"]:
        optimizer.zero_grad()
        images, targets = zip(*samples[at : at + BATCH], strict=True)
        sum(net([*images], [*targets]).values()).backward()
        optimizer.step()
    return net.eval()


@pytest.mark.parametrize("ranks", [1, *slow(3)])
def test_training_metrics_and_predictions_like_plain_pytorch(ranks: int) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    config = make_config(ranks, seed=0)
    results = run_ranks(trained, 3, config) if ranks == 3 else [trained(config)]
    net, samples = train_plainly(config), Shapes(7).samples
    with torch.no_grad():
        (*preds,) = net([image for image, _ in samples])
    scores = torch.cat([prediction["scores"] for prediction in preds])
    for result in results:
        assert apart(result["weights"], dict(net.named_parameters())) < 1e-12
        expected = {
            "scores/sum": scores.sum().item(),
            "scores/found": len(scores),
            "scores/boxes": 6,
        }
        assert result["val"] == pytest.approx(expected, rel=1e-12)
    rows = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert rows == parquet.read_table("predictions.parquet").to_pylist()
    for index, (row, prediction, (_, target)) in enumerate(zip(rows, preds, samples, strict=True)):
        assert [*row] == ["index", "preds", "target"]
        assert row["index"] == index
        for key, value in prediction.items():
            written = torch.tensor(row["preds"][key], dtype=value.dtype)
            torch.testing.assert_close(written, value, rtol=0, atol=1e-12)
        assert row["target"] == {name: value.tolist() for name, value in target.items()}
    assert len({len(row["preds"]["boxes"]) for row in rows}) > 1


def test_the_weights_are_exported_and_programs_are_refused(capsys: Capture) -> None:
    Runner.from_config(make_config(1)).train()
    assert main(["export", "runs/shapes", "--to", "safetensors"]) == 0
    assert "largest difference from the model: 0\n" in capsys.readouterr().out
    net = Detector()
    net.load_state_dict(load_file("runs/shapes/model.safetensors"))
    assert apart(net.state_dict(), load_model("runs/shapes").state_dict()) == 0
    for kind in ("pt2", "onnx"):
        assert main(["export", "runs/shapes", "--to", kind]) == 2
        text = "Detector returns a list with a dict for each sample, as detectors do"
        assert text in capsys.readouterr().err


def test_a_metric_of_the_loss_is_an_error_that_says_why(capsys: Capture) -> None:
    config = make_config(1, metrics={"loss": {"type": "MeanLoss"}})
    dump_config(config_from_dict(config), "shapes.yaml")
    assert main(["train", "shapes.yaml"]) == 2
    lines = Path("shapes.yaml").read_text().splitlines()
    number = lines.index("  loss:") + 1
    error = capsys.readouterr().err
    assert f"shapes.yaml:{number}: metrics.loss: MeanLoss needs loss, num_samples" in error
    assert re.search("detector, .*remove this metric", error)
