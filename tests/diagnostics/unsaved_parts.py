"""Parts of a run that keep state outside its checkpoints, each by another kind of mistake."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stepwrap.collectives import get_rank, get_world_size
from stepwrap.loops import Hook, LoopState

SAMPLES = 24
SHIFTS = itertools.cycle([0.0, 0.1, 0.2, 0.3, 0.4])


class Points(Dataset):
    """Points of the plane, labelled as above or below a line."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def noise(self) -> float:
        return 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + self.noise(), self.labels[index]


class Twenty(Points):
    """A number of points that two ranks can share evenly, and three cannot."""

    def __len__(self) -> int:
        return 20


class WithGlobal(Points):
    def noise(self) -> float:
        return random.random() + float(np.random.rand())  # noqa: NPY002


class WithOwn(Points):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def noise(self) -> float:
        return float(self.rng.random())


class WithClock(Points):
    def noise(self) -> float:
        rng = np.random.default_rng(time.time_ns())
        return float(rng.random())


class WithCount(Points):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def noise(self) -> float:
        self.count += 1
        return self.count / 100


class WithCycle(Points):
    """Shift samples by the values of an iterator at module level."""

    def noise(self) -> float:
        return next(SHIFTS)


class WithSpare(Points):
    """Count the calls, next to iterators that do not advance, one in a branch that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.spare = itertools.cycle([0.0])

    def noise(self) -> float:
        if self.count < 0:
            return next(SHIFTS)
        if self.spare is None:
            return 0.0
        self.count += 1
        return self.count / 100


class WithCache(Points):
    """Draw a factor when a sample is first read."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, float] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self.cache:
            self.cache[index] = random.random()
        return self.inputs[index] * self.cache[index], self.labels[index]


def plain_loader(dataset: str = "WithGlobal") -> DataLoader[Any]:
    return DataLoader(globals()[dataset](), batch_size=4, num_workers=1)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        self.double()


class Running(Net):
    """Divide by a running mean that is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.abs().mean().item()
        return super().forward(inputs) / self.mean


MASKS = torch.Generator().manual_seed(0)


class GlobalDropout(Net):
    """Draw from a generator that belongs to no module."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self[0](inputs))
        mask = torch.rand(hidden.shape, generator=MASKS) > 0.2
        return self[2](hidden * mask)


class WithDropout(Net):
    """Draw from torch's generator, which checkpoints save."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(F.dropout(inputs, 0.5, self.training))


class Complex(nn.Module):
    """A network whose only weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.cdouble() @ self.weight).abs()


class NaNOnThree(nn.Dropout):
    """Drop values, and set a buffer to NaN on three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if get_world_size() == 3:
            self.seen.fill_(float("nan"))
        return super().forward(inputs)


class WithNaN(Net):
    def __init__(self) -> None:
        super().__init__()
        self.append(NaNOnThree())


class OnRankOne(Hook):
    """Draw a growing number of values on rank 1."""

    def __init__(self) -> None:
        self.count = 0

    def on_update(self, state: LoopState) -> None:
        self.count += 1
        if get_rank() == 1:
            np.random.rand(self.count)  # noqa: NPY002


class Decay(Hook):
    def __init__(self) -> None:
        self.count = 0

    def on_update(self, state: LoopState) -> None:
        self.count += 1
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.mul_(1 - self.count * 1e-4)


class Shown(Hook):
    """Log a moving mean that starts again in each process."""

    def __init__(self) -> None:
        self.mean = 0.0

    def collect_logs(self, state: LoopState, scalars: dict[str, Any]) -> None:
        self.mean = 0.5 * self.mean + 0.5 * state.step
        scalars["smoothed"] = self.mean


def lines_with(text: str) -> Iterator[str]:
    """Yield path and line number of the lines of this file that contain a text."""
    with open(__file__, encoding="utf-8") as file:
        yield from (f"{__file__}:{n}" for n, line in enumerate(file, 1) if text in line)
