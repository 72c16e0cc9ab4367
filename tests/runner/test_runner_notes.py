"""Errors from inside torch name the line of the user's code and the batch."""

import re
import sys
from pathlib import Path

import pytest

from stepwrap.runner.command.cli import main

MODULE = '''
import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Points of which one may be longer than the others; labels from 0 to 2."""

    def __init__(self, size=12, long=-1, classes=3):
        self.size, self.long, self.classes = size, long, classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.ones(3 if index == self.long else 2), index % self.classes


class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.head = nn.Linear(width, 3)

    def forward(self, points):
        return self.head(points)
'''
CONFIG = """\
imports: [shapes.py]
model: {type: SupervisedModel, net: {type: shapes.Net}, loss: {type: CrossEntropyLoss}}
optimizer: {type: SGD, lr: 0.1}
data:
  train: {dataset: {type: shapes.Points}, batch_size: 4}
  val: {dataset: {type: shapes.Points}, batch_size: 4}
train: {type: EpochTrainLoop, max_epochs: 1}
metrics: {accuracy: {type: MulticlassAccuracy, num_classes: 3}}
hooks: {progress: false, checkpoint: false}
"""
MODEL = r"SupervisedModel with net Net at .*shapes\.py:20 and loss CrossEntropyLoss"
RAGGED = r"  default_collate was given 3 x \[float32 \(2,\), int\], 1 x \[float32 \(3,\), int\]"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.train.dataset.classes=4",
            [
                r"IndexError: Target 3 is out of bounds\.",
                rf"  in loss \(CrossEntropyLoss\) of {MODEL}",
                r"  batch 1 of epoch 1: \[float32 \(4, 2\), int64 \(4,\) from 0 to 3\]",
            ],
        ),
        (
            "model.net.width=5",
            [
                r"RuntimeError: .*mat1 and mat2 shapes cannot be multiplied \(4x2 and 5x3\)",
                r"  at .*shapes\.py:26 in forward",
                rf"  in net\.head \(Linear\) of {MODEL}",
                r"  batch 1 of the validation: \[float32 \(4, 2\), int64 \(4,\) from 0 to 2\]",
            ],
        ),
        (
            "data.train.dataset.long=5",
            [
                r"RuntimeError: stack expects each tensor to be equal size, .*",
                r"  while reading batch 2 of epoch 1 from Points at .*shapes\.py:7",
                RAGGED,
            ],
        ),
        (
            "data.train.dataset.long=5 data.train.num_workers=1",
            [
                r"RuntimeError: stack expects each .* \(Caught RuntimeError in DataLoader .*\)",
                RAGGED,
                r"  while reading batch 2 of epoch 1 from Points at .*shapes\.py:7",
            ],
        ),
        (
            "metrics.accuracy.num_classes=4",
            [
                r"ValueError: If `preds` have one dimension more than `target`, .*",
                r"  in metric 'accuracy' \(MulticlassAccuracy\), which was given "
                r"\{preds: float32 \(4, 3\), target: int64 \(4,\) from 0 to 2\}",
            ],
        ),
    ],
    ids=["labels", "widths", "ragged", "ragged in a worker", "metric"],
)
def test_an_error_names_the_line_and_the_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    message: list[str],
) -> None:
    (tmp_path / "shapes.py").write_text(MODULE)
    (tmp_path / "shapes.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shapes", raising=False)
    assert main(["train", "shapes.yaml", *override.split()]) == 1
    lines = capsys.readouterr().err.splitlines()
    for expected, line in zip(message, lines, strict=False):
        assert re.fullmatch(expected, line), (expected, line)
    assert len(lines) > len(message)
