"""The seconds for which a save or a load of a checkpoint blocks the training, on one process.

A perceptron with the state of Adam, saved to the disk and loaded again: by `torch.save` with a
sync of the file, by torch's distributed checkpoint with files of safetensors, and by stepwrap,
which also hashes each file and publishes the folder at once. The order is shuffled in every round;
ratios are taken within a round. The files are in the page cache when they are loaded.

Then the same state is saved in the background: by `dcp.async_save`, by Lightning's
`AsyncCheckpointIO` and by stepwrap's `CheckpointHook`, also on two ranks under DDP. The figures are
the seconds until the training may continue, and the time of a training step of a small model on one
thread meanwhile.

    python benchmarks/checkpoints.py [--rounds 5] [--sizes 1e6 1e7 1e8] [--folder FOLDER]
"""

import argparse
import json
import os
import shutil
import tempfile
import threading
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
from turns import process_group, spawn, take_turns

from stepwrap.loops import CheckpointHook, LoopState, load_checkpoint, save_checkpoint
from stepwrap.wrappers import OptimWrapper, SingleDevice, StepDistributedDataParallel

LAYERS, INPUTS = 10, 1000


class Contents:
    """A trained model and its optimizer, in every form that a contestant saves."""

    def __init__(self, size: int, wrapper: Any = SingleDevice) -> None:
        outputs = max(1, size // (LAYERS * INPUTS))
        self.model = nn.Sequential(*[nn.Linear(INPUTS, outputs) for _ in range(LAYERS)])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.size, self.wrapper = size, wrapper
        self.state = LoopState(wrapper(self.model), OptimWrapper(self.optimizer))

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


class SaveWithHook:
    """Saves as a training does, at the interval of `CheckpointHook`."""

    def __init__(self, contents: Contents, folder: Path, *, background: bool = True) -> None:
        self._state = contents.state
        self._state.run_dir = self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._hook = CheckpointHook(
            every_steps=1, every_epochs=None, keep_last=1, background=background
        )
        self._hook.on_train_start(self._state)

    def __call__(self, done: threading.Event) -> None:
        self._state.step += 1
        # `after_save` is called on rank 0 only.
        self._marker = self._folder / f"saved_{self._state.step}"
        self._state.after_save = [lambda path: self._marker.touch()]
        self._hook.on_save_point(self._state)

    def has_ended(self) -> bool:
        return self._marker.exists()

    def finish(self) -> None:
        """Let the hook see the end of the save; the step is saved already."""
        self._state.clock_s += 1
        self._hook.on_save_point(self._state)

    def close(self) -> None:
        self._hook.on_train_end(self._state)


class SaveWithDcp:
    def __init__(self, contents: Contents, folder: Path) -> None:
        self._contents, self._folder = contents, folder

    def __call__(self, done: threading.Event) -> None:
        writer = HuggingFaceStorageWriter(str(self._folder))
        saving: Any = dcp.async_save(self._contents.flat(), storage_writer=writer, no_dist=True)
        saving.add_done_callback(lambda _: done.set())


class SaveWithLightning:
    def __init__(self, contents: Contents, folder: Path) -> None:
        from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        class ReportingIO(TorchCheckpointIO):
            def save_checkpoint(io, *args: Any, **options: Any) -> None:  # noqa: N805
                super().save_checkpoint(*args, **options)
                self._done.set()

        self._contents, self._path = contents, folder / "checkpoint.ckpt"
        folder.mkdir(parents=True, exist_ok=True)
        self._io = AsyncCheckpointIO(ReportingIO())

    def __call__(self, done: threading.Event) -> None:
        self._done = done
        self._io.save_checkpoint(self._contents.nested(), str(self._path))


class Probe:
    """A training step of a small model."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(64, 256)

    def time_steps(self, is_over: Callable[[int], bool]) -> float:
        """Return the mean seconds of a step, of at least one."""
        start, count = time.perf_counter(), 0
        while not (count and is_over(count)):
            self._optimizer.zero_grad()
            self._model(self._inputs).square().mean().backward()
            self._optimizer.step()
            count += 1
        return (time.perf_counter() - start) / count


def measure_blocked(save: Any, probe: Probe) -> tuple[float, float]:
    """Return the seconds until a save returns, and the seconds of a step until it is complete."""
    done = threading.Event()
    start = time.perf_counter()
    save(done)
    blocked_s = time.perf_counter() - start
    has_ended = getattr(save, "has_ended", done.is_set)
    step_s = probe.time_steps(lambda _: has_ended())
    getattr(save, "finish", lambda: None)()
    return blocked_s, step_s


def measure_in_background(
    contents: Contents, folder: Path, rounds: int, *, peers: bool
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the savers by figure and contestant."""
    torch.set_num_threads(1)
    probe = Probe()
    savers: dict[str, Any] = {
        "stepwrap, in the background": SaveWithHook(contents, folder / "background"),
    }
    if peers:
        savers["dcp.async_save"] = SaveWithDcp(contents, folder / "dcp")
        savers["Lightning, AsyncCheckpointIO"] = SaveWithLightning(contents, folder / "lightning")
    runs = {name: partial(measure_blocked, saver, probe) for name, saver in savers.items()}
    waiting_contents = Contents(contents.size, contents.wrapper)
    waiting = SaveWithHook(waiting_contents, folder / "waiting", background=False)
    runs["stepwrap, waiting"] = partial(measure_blocked, waiting, probe)
    runs["no save"] = lambda: (0.0, probe.time_steps(lambda count: count == 200))
    results = take_turns(runs, rounds, warm_up=1)
    for saver in (*savers.values(), waiting):
        getattr(saver, "close", lambda: None)()
    names = ("stepwrap, waiting", *savers)
    return {
        "blocked": {name: [pair[0] for pair in results[name]] for name in names},
        "step": {name: [pair[1] for pair in results[name]] for name in ("no save", *savers)},
    }


def run_rank(rank: int, store: str, ranks: int, size: int, folder: Path, rounds: int) -> None:
    with process_group(rank, ranks, store):
        contents = Contents(size, StepDistributedDataParallel)
        figures = measure_in_background(contents, folder, rounds, peers=False)
    if rank == 0:
        (folder / "figures").write_text(json.dumps(figures))


def report_in_background(report: Report, size: int, folder: Path, rounds: int) -> None:
    single = measure_in_background(Contents(size), folder / "single", rounds, peers=True)
    spawn(run_rank, 2, 2, size, folder, rounds)
    ranks = json.loads((folder / "figures").read_text())
    for title, figures in (("one process", single), ("two ranks", ranks)):
        where = f"{size:.0e} parameters with Adam, {title}"
        report.add(f"blocked, {where}", "s", figures["blocked"], "stepwrap, waiting")
        report.add(f"a step meanwhile, {where}", "s", figures["step"], "no save")


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
            del contents, runs
            report_in_background(report, int(size), folder, options.rounds)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
