"""The commands that create a config: init, with a project for it, and convert, from mmengine's."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..convert.convert import convert_config
from .command import Options, mistake

_CONFIG = """\
# The settings of `stepwrap train config.yaml`. `type` names a class; the other keys are its
# arguments. `stepwrap check config.yaml` reports mistakes.
name: "{name}"
seed: 0
model:
  type: SupervisedModel
  net: {{type: model.Net, width: 64}}
  loss: {{type: CrossEntropyLoss}}
optimizer: {{type: AdamW, lr: 0.005}}
data:
  train: {{dataset: {{type: data.Spirals, size: 3000, seed: 0}}, batch_size: 64, shuffle: true}}
  val: {{dataset: {{type: data.Spirals, size: 600, seed: 1}}, batch_size: 200}}
  test: {{dataset: {{type: data.Spirals, size: 600, seed: 2}}, batch_size: 200}}
train: {{type: EpochTrainLoop, max_epochs: 10}}
metrics:
  accuracy: {{type: MulticlassAccuracy, num_classes: 3, average: micro}}
hooks:
  checkpoint: {{keep_best: accuracy}}
"""
_MODEL = '''\
"""The network. Replace it with your own; config.yaml names the class and its arguments."""

from torch import Tensor, nn


class Net(nn.Module):
    """Classifies points in the plane: maps `(batch, 2)` to the scores `(batch, 3)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)
'''
_DATA = '''\
"""The data, which is generated. Replace it with your own data set."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points on three spiral arms, each with the number of its arm as the label.

    Args:
        size: the number of points.
        seed: another seed gives other points.
    """

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (size,), generator=generator)
        radius = torch.rand(size, generator=generator)
        angle = 4 * radius + self.labels * 2 * math.pi / 3
        angle = angle + 0.15 * torch.randn(size, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]
'''
_TEST = '''\
"""Tests of the project; run them with `pytest`."""

from pathlib import Path

import torch
from data import Spirals
from model import Net
from stepwrap.registry import load_config
from stepwrap.runner import Runner

CONFIG = Path(__file__).with_name("config.yaml")


def test_the_net_returns_a_score_for_each_class() -> None:
    scores = Net(width=8)(torch.zeros(5, 2))
    assert scores.shape == (5, 3)


def test_the_data_depends_on_the_seed_only() -> None:
    first, again, other = Spirals(9, seed=0), Spirals(9, seed=0), Spirals(9, seed=1)
    assert torch.equal(first.points, again.points)
    assert not torch.equal(first.points, other.points)


def test_training_learns(tmp_path: Path) -> None:
    changes = ["train.max_epochs=2", f"run_dir={tmp_path}", "hooks.progress=false"]
    runner = Runner.from_config(load_config(CONFIG, changes))
    before = runner.validate()["accuracy"]
    after = runner.train().metrics["accuracy"]
    assert after > before
'''
_README = """\
# {name}

    stepwrap train config.yaml                      # train, validate and test
    stepwrap train config.yaml optimizer.lr=0.01 --run-dir runs/second
    stepwrap test config.yaml                       # evaluate the best checkpoint again
    pytest                                          # the tests of this project

| file | content |
|---|---|
| `config.yaml` | the run: model, optimizer, data, metrics |
| `model.py` | the network |
| `data.py` | the data set |
| `test_model.py` | the tests |
| `runs/{name}` | checkpoints, log records and curves of the run |
"""
_GITIGNORE = "runs/\n__pycache__/\n.pytest_cache/\n"
_FILES = {
    "config.yaml": _CONFIG,
    "model.py": _MODEL,
    "data.py": _DATA,
    "test_model.py": _TEST,
    "README.md": _README,
    ".gitignore": _GITIGNORE,
}
# Only these are formatted, because Python files contain braces.
_WITH_NAME = ("config.yaml", "README.md")
# The exit code of `convert` if some settings could not be converted.
INCOMPLETE = 3


def run_init(options: Options) -> int:
    """Write the files of a new project and print what to do next."""
    folder = Path(options.words[0])
    name = options.name or folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        message = f"the name must consist of letters, digits, _, - and ., got {name!r}"
        raise mistake(f"stepwrap init: {message}; choose another one with --name")
    existing = [file for file in _FILES if (folder / file).exists()]
    if existing:
        message = f"{folder} already has {', '.join(existing)}; nothing was written"
        raise mistake(f"stepwrap init: {message}; choose a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in _FILES.items():
            content = text.format(name=name) if file in _WITH_NAME else text
            (folder / file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise mistake(f"stepwrap init: {folder} cannot be written: {error.strerror}") from error
    print(f"created {folder} with {', '.join(_FILES)}")
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"train with: {enter}stepwrap train config.yaml")
    return 0


def run_convert(options: Options) -> int:
    """Convert an mmengine config; print YAML to stdout and unconverted settings to stderr."""
    # The output of the config and the warnings of mmengine must not mix with the YAML.
    with redirect_stdout(sys.stderr):
        conversion = convert_config(
            options.words[0], epoch_length=options.epoch_length, keep_order=options.keep_order
        )
    print(conversion.text(), end="")
    for title, misses in conversion.sorted_misses().items():
        print(f"{title}:", *misses, sep="\n  ", file=sys.stderr)
    return INCOMPLETE if any(miss.changes_result for miss in conversion.misses) else 0
