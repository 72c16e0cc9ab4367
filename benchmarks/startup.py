"""Time from the start of a process to its first update: `stepwrap train` and a plain script.

Both train the small network of configs/digits_single.yaml with AdamW on the digits, read by a
DataLoader, in fresh processes that end right after the first update. They take turns. The tables
show CPU time (user and system, more reliable on a busy machine), wall-clock time, and the CPU time
of each phase:

- import: the process starts and imports torch and other packages; `stepwrap` also reads and checks
  the config, and the plain script imports scikit-learn
- model: the model is built
- parts: everything else is built, such as the data and the optimizer (with the first optimizer
  torch imports its compiler)
- step: the first batch, forward, backward and update

"plain + torchmetrics" also imports and builds the metrics that the config names; "stepwrap, no
metrics" is the config without them.

    python benchmarks/startup.py [--rounds 7] [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from report import Report, parse_options
from turns import take_turns

PHASES = ("import", "model", "parts", "step")

# Each program marks the end of a phase, in CPU time and in the clock that all processes share.
_MARKS = """
import json, os, resource, time
marks = []
def mark():
    used = resource.getrusage(resource.RUSAGE_SELF)
    marks.append((used.ru_utime + used.ru_stime, time.clock_gettime(time.CLOCK_MONOTONIC)))
def finish():
    mark()
    with open(os.environ["STARTUP_MARKS"], "w") as file:
        json.dump(marks, file)
    os._exit(0)
"""

_PLAIN = """
from startup_marks import finish, mark
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
METRICS
mark()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 16, 10),
)
mark()
pixels, labels = load_digits(return_X_y=True)
images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8).float() / 16
data = TensorDataset(images[:1197], torch.from_numpy(labels[:1197]).long())
loader = DataLoader(data, batch_size=64, shuffle=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
mark()
for inputs, targets in loader:
    loss = criterion(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    finish()
"""
_METRICS = """
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
MulticlassAccuracy(num_classes=10, average="micro"), MulticlassF1Score(num_classes=10)
"""

# Parts for the config of `stepwrap`: a model that marks when it is built, and a hook.
_PARTS = """
from startup_marks import finish, mark
from stepwrap.configs.digits import SmallCNN
from stepwrap.registry import HOOKS, MODELS

@MODELS.register_module()
class MarkedCNN(SmallCNN):
    def __init__(self, **kwargs):
        mark()
        super().__init__(**kwargs)
        mark()

@HOOKS.register_module()
class Marks:
    order = 0
    def on_train_start(self, state):
        mark()
    def on_update(self, state):
        finish()
"""
_STEPWRAP = """
import sys
from stepwrap.runner.command.cli import main
sys.exit(main())
"""
_OVERRIDES = ("imports=[startup_parts]", "model.net.type=MarkedCNN", "hooks.marks.type=Marks")

Marks = list[list[float]]


def start_once(program: list[str], folder: Path) -> Marks:
    """Run a program to its first update and return (CPU s, s) at the end of each phase."""
    file = folder / "marks.json"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "STARTUP_MARKS": str(file), "PYTHONPATH": str(folder)}
    # Let Python cache byte code, like that of an installed package.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.clock_gettime(time.CLOCK_MONOTONIC)
    subprocess.run(
        [sys.executable, *program], cwd=folder, env=environment, check=True, capture_output=True
    )
    marks: Marks = json.loads(file.read_text())
    return [[cpu, clock - begun] for cpu, clock in marks]


def contestants(folder: Path) -> dict[str, list[str]]:
    """Write the programs into `folder` and return the arguments of python by name."""
    sources = {
        "startup_marks": _MARKS,
        "startup_parts": _PARTS,
        "plain": _PLAIN.replace("METRICS", ""),
        "plain_metrics": _PLAIN.replace("METRICS", _METRICS),
        "command": _STEPWRAP,
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    train = ["command.py", "train", "digits_single", "--fresh", *_OVERRIDES]
    return {
        "plain": ["plain.py"],
        "plain + torchmetrics": ["plain_metrics.py"],
        "stepwrap": train,
        "stepwrap, no metrics": [*train, "metrics=null", "hooks.checkpoint.keep_best=null"],
    }


def measure(rounds: int) -> dict[str, list[Marks]]:
    """Return the marks of every contestant by round."""
    with tempfile.TemporaryDirectory() as name:
        programs = contestants(Path(name))
        runs = {
            contestant: partial(start_once, program, Path(name))
            for contestant, program in programs.items()
        }
        # The first round writes the byte code.
        return take_turns(runs, rounds, warm_up=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parse_options(parser, {"rounds": 1})
    report, runs = Report(options.json), measure(options.rounds)
    peers = {"stepwrap": "plain + torchmetrics", "stepwrap, no metrics": "plain"}
    for title, at in (("processor time", 0), ("clock", 1)):
        values = {name: [marks[-1][at] for marks in rounds] for name, rounds in runs.items()}
        report.add(f"from process start to the first update, {title}", "s", values, peers)
    spent: dict[str, dict[str, list[float]]] = {phase: {} for phase in PHASES}
    for name, rounds in runs.items():
        for marks in rounds:
            ends = [0.0, *(cpu for cpu, _ in marks)]
            for phase, start, end in zip(PHASES, ends, ends[1:], strict=False):
                spent[phase].setdefault(name, []).append(max(end - start, 1e-6))
    for phase, values in spent.items():
        report.add(f"of that, {phase}, processor time", "s", values, peers)


if __name__ == "__main__":
    main()
