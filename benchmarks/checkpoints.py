"""The seconds for which a save or a load of a checkpoint blocks the training, on one process.

A perceptron with the state of Adam, saved to the disk and loaded again: by `torch.save` with a
sync of the file, by torch's distributed checkpoint with files of safetensors, and by stepwrap,
which also hashes each file and publishes the folder at once. The order is shuffled in every round;
ratios are taken within a round. The files are in the page cache when they are loaded.

    python benchmarks/checkpoints.py [--rounds 5] [--sizes 1e6 1e7 1e8] [--folder FOLDER]
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from report import Report, parse_options
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from turns import take_turns

from stepwrap.loops import LoopState, load_checkpoint, save_checkpoint
from stepwrap.wrappers import OptimWrapper, SingleDevice

LAYERS, INPUTS = 10, 1000


class Contents:
    """A trained model and its optimizer, in every form that a contestant saves."""

    def __init__(self, size: int) -> None:
        outputs = max(1, size // (LAYERS * INPUTS))
        self.model = nn.Sequential(*[nn.Linear(INPUTS, outputs) for _ in range(LAYERS)])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = LoopState(SingleDevice(self.model), OptimWrapper(self.optimizer))

    def nested(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """Return only the tensors, because the writer for safetensors refuses other values."""
        tensors = dict(self.model.state_dict())
        for index, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optim.{index}.{name}": value for name, value in entries.items()}
        return tensors


def save_with_torch(contents: Contents, folder: Path) -> None:
    folder.mkdir()
    with (folder / "checkpoint.pt").open("wb") as file:
        torch.save(contents.nested(), file)
        file.flush()
        os.fsync(file.fileno())


def load_with_torch(contents: Contents, folder: Path) -> None:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    contents.model.load_state_dict(saved["model"])
    contents.optimizer.load_state_dict(saved["optim"])


def save_with_dcp(contents: Contents, folder: Path) -> None:
    dcp.save(contents.flat(), storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)


def load_with_dcp(contents: Contents, folder: Path) -> None:
    dcp.load(contents.flat(), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def save_with_stepwrap(contents: Contents, folder: Path) -> None:
    save_checkpoint(folder, contents.state)


def load_with_stepwrap(contents: Contents, folder: Path) -> None:
    load_checkpoint(next(folder.glob("step_*"))).restore(contents.state)


CONTESTANTS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "torch.save": (save_with_torch, load_with_torch),
    "torch.distributed.checkpoint, safetensors": (save_with_dcp, load_with_dcp),
    "stepwrap": (save_with_stepwrap, load_with_stepwrap),
}


def measure(save: Any, load: Any, contents: Contents, folder: Path) -> tuple[float, float]:
    """Return the seconds of a save and of a load."""
    folder /= "checkpoint"
    start = time.perf_counter()
    save(contents, folder)
    middle = time.perf_counter()
    load(contents, folder)
    end = time.perf_counter()
    shutil.rmtree(folder)
    return middle - start, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    options = parse_options(parser, {"rounds": 3, "sizes": [1e6]})
    report = Report(options.json)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for size in options.sizes:
            contents, folder = Contents(int(size)), Path(name)
            runs = {
                contestant: partial(measure, save, load, contents, folder)
                for contestant, (save, load) in CONTESTANTS.items()
            }
            rounds = take_turns(runs, options.rounds, warm_up=1)
            for index, action in enumerate(("save", "load")):
                seconds = {k: [pair[index] for pair in v] for k, v in rounds.items()}
                title = f"{action}, {size:.0e} parameters with Adam"
                report.add(title, "s", seconds, "torch.save")


if __name__ == "__main__":
    main()
