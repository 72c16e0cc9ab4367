"""Small real runs for the tests of the hooks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pyte
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric

from stepwrap.collectives import get_world_size
from stepwrap.loops.data.loaders import build_loader
from stepwrap.loops.evaluate import ValLoop
from stepwrap.loops.hook import Hook, HookList
from stepwrap.loops.state import LoopState
from stepwrap.loops.train import EpochTrainLoop
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    SupervisedModel,
)


def data(samples: int = 16, *, seed: int = 0) -> TensorDataset:
    """Return a linear problem: inputs `(samples, 3)`, targets `(samples, 1)`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(samples: int = 16, *, batch_size: int = 4) -> DataLoader[Any]:
    """Return this rank's share of `data`, `samples / batch_size` batches over all ranks."""
    return build_loader(data(samples), batch_size=batch_size)


def new_state(
    *, run_dir: Path | None = None, lr: float = 0.05, net: nn.Module | None = None, **optim: Any
) -> LoopState:
    """Return the state of a fresh run: a linear model, SGD, one process or DDP."""
    torch.manual_seed(0)
    model = SupervisedModel(net or nn.Linear(3, 1), nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    wrapper = StepDistributedDataParallel if get_world_size() > 1 else SingleDevice
    return LoopState(
        model=wrapper(model), optim_wrapper=OptimWrapper(optimizer, **optim), run_dir=run_dir
    )


def train(
    state: LoopState, hooks: Sequence[Hook], *, epochs: int = 2, **settings: Any
) -> LoopState:
    """Train for epochs of 4 batches (over all ranks), with a validation after each."""
    settings = {"log_every_steps": 2, "val_loop": ValLoop(loader(8), metrics()), **settings}
    batches = settings.pop("dataloader", None) or loader()
    return EpochTrainLoop(batches, max_epochs=epochs, **settings).run(state, HookList(hooks))


def metrics() -> dict[str, MeanSquaredError]:
    return {"error": MeanSquaredError()}


def scripted(*values: float, higher_is_better: bool | None = None) -> Metric:
    """Return a metric that computes these values in turn, optionally with a direction."""
    script = iter(values)

    class Scripted(Metric):
        def update(self, num_samples: int) -> None: ...

        def compute(self) -> Tensor:
            return torch.tensor(next(script))

    Scripted.higher_is_better = higher_is_better
    return Scripted()


def rates(optimizer: Optimizer, steps: int, *schedulers: Any) -> list[list[float]]:
    """Return the rates of all groups at each step of schedulers that are stepped by hand."""
    rates_by_step = []
    for _ in range(steps):
        rates_by_step.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates_by_step


def weights(state: LoopState) -> list[Tensor]:
    return [param.detach().clone() for param in state.model.parameters()]


class Terminal:
    """A pseudo-terminal that replaces standard output and error inside a `with` block."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._size = rows, columns
        self._reading, writing = pty.openpty()
        self.stream: TextIO = os.fdopen(writing, "w", encoding="utf-8")
        self._set_size(rows, columns)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        self._redirects = contextlib.ExitStack()
        self._redirects.enter_context(contextlib.redirect_stdout(self.stream))
        self._redirects.enter_context(contextlib.redirect_stderr(self.stream))
        return self

    def __exit__(self, *error: Any) -> None:
        self._redirects.close()
        self.text()

    def resize(self, columns: int, rows: int = 24) -> None:
        """Change the size of the terminal and of later screens in ``screens``."""
        self._set_size(rows, columns)
        os.write(self.stream.fileno(), f"\x1b]resize;{rows};{columns}\x07".encode())

    def text(self) -> str:
        """Close the terminal and return everything written to it."""
        if not self.stream.closed:
            self.stream.close()
        self._reader.join()
        return b"".join(self._parts).decode()

    def screens(self) -> list[list[str]]:
        """Close the terminal; return the screen before each erasure and at the end, as rows.

        The last screen includes the rows that were scrolled away.
        """
        screen = pyte.HistoryScreen(self._size[1], self._size[0], history=1000, ratio=1.0)
        stream = pyte.Stream(screen)
        terminal_screens: list[list[str]] = []
        for output in re.split(r"(\x1b\]resize;\d+;\d+\x07|\r\x1b\[J)", self.text()):
            if output == "\r\x1b[J":
                terminal_screens.append([row.rstrip() for row in screen.display])
            if output.startswith("\x1b]resize"):
                screen.resize(*map(int, output[:-1].split(";")[1:]))
            else:
                stream.feed(output)
        above = ["".join(row[x].data for x in range(screen.columns)) for row in screen.history.top]
        return [*terminal_screens, [row.rstrip() for row in [*above, *screen.display]]]

    def _set_size(self, rows: int, columns: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, size)

    def _read(self) -> None:
        # On Linux, reading a pseudo-terminal without writers raises OSError.
        with contextlib.suppress(OSError):
            while chunk := os.read(self._reading, 65536):
                self._parts.append(chunk)
        os.close(self._reading)
