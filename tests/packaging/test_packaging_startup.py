"""Imports, files and objects of a run until its first update, in a separate process."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import ended, run

# Installed packages that a run without metrics, bars, plots and loggers must not import.
HEAVY = {
    *("IPython", "datasets", "lightning", "matplotlib", "mmengine", "mpi4py", "pandas"),
    *("pytorch_lightning", "rich", "scipy", "sklearn", "sympy", "tensorboard", "torchmetrics"),
}
HEAVY_IN_TORCH = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.testing", "torch.utils.tensorboard"),
)

# 352 when this was written; a third of them belong to OmegaConf and PyYAML.
MOST_MODULES = 355

PARTS = """
import json, os, sys
from collections import Counter
import torch
from torch import nn
from torch.utils.data import TensorDataset

built = Counter()

def counted(kind):
    class Counted(kind):
        def __init__(self, *args, **kwargs):
            built[kind.__name__] += 1
            super().__init__(*args, **kwargs)
    return Counted

class Points(TensorDataset):
    def __init__(self, size):
        super().__init__(torch.randn(size, 2), torch.zeros(size, dtype=torch.long))

class Report:
    def on_update(self, state):
        report = {"built": built, "opened": opened, "modules": sorted({*sys.modules} - known)}
        with open("report.json", "w") as file:
            json.dump(report, file)
        os._exit(0)

from stepwrap.loops import EpochTrainLoop, LogHook, ValLoop
from stepwrap.wrappers import OptimWrapper, SingleDevice

from __main__ import known, opened

CountedPoints, CountedNet, CountedReport = counted(Points), counted(nn.Linear), counted(Report)
CountedSGD, CountedStepLR = counted(torch.optim.SGD), counted(torch.optim.lr_scheduler.StepLR)
CountedLoop, CountedWrapper = counted(EpochTrainLoop), counted(SingleDevice)
CountedLog, CountedVal, CountedOptim = counted(LogHook), counted(ValLoop), counted(OptimWrapper)
"""

CONFIG = """
imports: [parts.py]
model:
  type: SupervisedModel
  net: {type: parts.CountedNet, in_features: 2, out_features: 2}
  loss: {type: CrossEntropyLoss}
wrapper: {type: parts.CountedWrapper}
optimizer: {type: parts.CountedSGD, lr: 0.1}
optim_wrapper: {type: parts.CountedOptim}
schedulers: {type: parts.CountedStepLR, step_size: 1}
data:
  train: {dataset: {type: parts.CountedPoints, size: 8}, batch_size: 4}
  val: {dataset: {type: parts.CountedPoints, size: 8}, batch_size: 4}
train: {type: parts.CountedLoop, max_epochs: 1}
val: {type: parts.CountedVal}
hooks: {log: {type: parts.CountedLog}, report: {type: parts.CountedReport}}
"""

# torch imports its compiler with the first optimizer, so create one before the measurement.
PROGRAM = """
import sys
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
known = {*sys.modules}
opened = []
def note(event, args):
    if event == "open" and str(args[0]).endswith("run.yaml"):
        opened.append(args[0])
sys.addaudithook(note)
from stepwrap.runner.command.cli import main
sys.exit(main(["train", "run.yaml"]))
"""

IMPORTED = """
import sys
import torch
known = {*sys.modules}
import stepwrap.loops, stepwrap.runner.command.run_commands, stepwrap.wrappers
print(*sorted({*sys.modules} - known))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a first update."""
    folder: Path = tmp_path_factory.mktemp("started")
    for name, text in {"parts.py": PARTS, "run.yaml": CONFIG, "program.py": PROGRAM}.items():
        (folder / name).write_text(text)
    done = ended("program.py", cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "report.json").read_text())


def unused(modules: list[str]) -> list[str]:
    loaded = {name for name in modules if name.partition(".")[0] in HEAVY}
    return sorted(loaded | {module for module in modules if module.startswith(HEAVY_IN_TORCH)})


def test_the_library_imports_nothing_heavy() -> None:
    assert not unused(run("-c", IMPORTED).split())


def test_a_run_imports_nothing_heavy_that_it_does_not_use(started: dict[str, Any]) -> None:
    assert not unused(started["modules"])
    for name in ("checkpoint_commands", "weight_commands"):
        assert f"stepwrap.runner.command.{name}" not in started["modules"]


def test_the_imports_of_a_run_keep_to_their_budget(started: dict[str, Any]) -> None:
    assert len(started["modules"]) <= MOST_MODULES


def test_a_config_is_read_once_and_its_parts_are_built_once(started: dict[str, Any]) -> None:
    once = "EpochTrainLoop LogHook Linear OptimWrapper Report SGD SingleDevice StepLR ValLoop"
    assert started["built"] == {**dict.fromkeys(once.split(), 1), "Points": 2}
    assert len(started["opened"]) == 1
