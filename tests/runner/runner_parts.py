"""A small run as a user writes it, and the command in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import warm
from forks import TEMPLATE
from safetensors.torch import load_file
from torch import Tensor

from stepwrap.collectives import get_rank, get_world_size
from stepwrap.loops import Hook, LoopState, find_checkpoint
from stepwrap.registry import Config, load_config
from stepwrap.runner.command.cli import main

# A run that is restarted starts six processes; a busy machine needs two minutes for them.
TIMEOUT_S = 500.0

MODULE = '''
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    """Points in the plane above or below a line; reading one can take time or fail.

    `deadly` ends the process instead, by SIGKILL or, as "exit", with exit code 0. A restarted
    process does not fail, unless `always`.
    """

    def __init__(
        self, size=48, pause_s=0.0, bad=-1, bad_rank=0, deadly=False, mark=None, always=False
    ):
        self.size, self.pause_s, self.bad, self.deadly = size, pause_s, bad, deadly
        self.mark = mark
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.here = (is_first or always) and int(os.environ.get("RANK", "0")) == bad_rank
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 2, generator=generator)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.mark:
            open(self.mark, "a").close()
        time.sleep(self.pause_s)
        if index == self.bad and self.here:
            if self.deadly == "exit":
                os._exit(0)
            if self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"sample {index} is broken")
        return self.inputs[index], self.labels[index]


def plain_loader(**options):
    """A loader as a user makes one."""
    return DataLoader(Points(pause_s=0.005), batch_size=4, num_workers=2, **options)


class Net(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Linear(2, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 2))
'''

CONFIG = """\
imports: [points.py]
seed: 3
model:
  type: SupervisedModel
  net: {type: points.Net, width: 8}
  loss: {type: CrossEntropyLoss}
optimizer: {type: AdamW, lr: 0.01}
schedulers: {type: CosineAnnealingLR, T_max: 4, by: epoch}
data:
  train: {dataset: {type: points.Points}, batch_size: 4, shuffle: true}
  val: {dataset: {type: points.Points, size: 20}, batch_size: 8}
  test: {dataset: {type: points.Points, size: 21}, batch_size: 8}
train: {type: EpochTrainLoop, max_epochs: 4, log_every_steps: 5}
metrics:
  accuracy: {type: MulticlassAccuracy, num_classes: 2, average: micro}
  loss: {type: MeanLoss}
hooks:
  checkpoint: {every_steps: 3, keep_last: null, keep_best: accuracy}
"""


def write_run(folder: Path) -> Path:
    """Write the user's module and config, and return the config's path."""
    (folder / "points.py").write_text(MODULE)
    config = folder / "points.yaml"
    config.write_text(CONFIG)
    return config


def points_config(folder: Path, *words: str) -> Config:
    """Return the small run's config; forget another test's `points` module on this rank."""
    sys.modules.pop("points", None)
    return load_config(folder / "points.yaml", ["hooks.progress=false", *words])


def run_command(folder: Path, *words: str) -> int:
    """Run `stepwrap ...` in a folder on ranks that were started otherwise."""
    os.chdir(folder)
    # A module of this name from another test's folder may have been imported here.
    sys.modules.pop("points", None)
    os.environ |= {"RANK": str(get_rank()), "WORLD_SIZE": str(get_world_size())}
    return main(list(words))


class Command:
    """`stepwrap ...` in a separate process, whose descendants can be found."""

    def __init__(self, *words: str | Path, cwd: Path) -> None:
        self.process = warm.popen(
            *("-m", "stepwrap.runner", *words),
            cwd=cwd,
            # The temporary files of a killed process are removed with the test's folder.
            env={**os.environ, "TMPDIR": str(cwd)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A separate process group, so that Ctrl-C reaches every process in it like in a shell.
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end and return the exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def wait_for(self, folder: Path, count: int) -> None:
        """Wait until there are `count` checkpoints."""

        def saved() -> int:
            # A starting run creates and removes the folder to test whether it can write there.
            with contextlib.suppress(FileNotFoundError):
                return len(list(folder.glob("checkpoints/step_*")))
            return 0

        self.wait_until(lambda: saved() >= count, f"no {count} checkpoints")

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        limit = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > limit:
                code, out, err = self.finish()
                raise AssertionError(f"{otherwise}; exit code {code}\n{out}\n{err}")
            time.sleep(0.01)

    def left_over(self) -> list[int]:
        """Return the processes of this command that are still running, including itself."""
        return list(self._names())

    def get_process(self, rank: int) -> int:
        """Return the process id of a started rank."""
        return next(pid for pid, name in self._names().items() if name == f"rank_{rank}")

    def _names(self) -> dict[int, str]:
        """Return the names of the processes in the session of this command, by process id."""
        names = {}
        for entry in Path("/proc").iterdir():
            # "7 (name) S <parent> <group> <session> ..."
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text() if entry.name.isdecimal() else ""
                start, _, fields = stat.rpartition(") ")
                state, _, _, session, *_ = fields.split() or [""] * 4
                name = start.partition("(")[2]
                if session == str(self.process.pid) and state not in "ZX" and name != TEMPLATE:
                    names[int(entry.name)] = name
        return names

    def wait_gone(self, limit_s: float = 60.0) -> list[int]:
        """Wait until none of its processes is left, and return those that still are."""
        limit = time.monotonic() + limit_s
        while (remaining := self.left_over()) and time.monotonic() < limit:
            time.sleep(0.05)
        return remaining

    def close(self) -> None:
        for process in self.left_over():
            os.kill(process, signal.SIGKILL)
        with self.process:
            pass


class SignalHook(Hook):
    """Send SIGTERM to this process after an update."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_update(self, state: LoopState) -> None:
        if state.step == self.at_step:
            os.kill(os.getpid(), signal.SIGTERM)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def final_weights(run_dir: Path) -> dict[str, Tensor]:
    path = find_checkpoint(run_dir)
    assert path is not None
    weights: dict[str, Tensor] = load_file(path / "model.safetensors")
    return weights


def assert_identical(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fail unless both have the same names and bit-identical tensors."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
