"""A small run in which one fault can be injected at one update, on one rank, in one place."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stepwrap.collectives import get_rank
from stepwrap.loops import Hook, LoopState

SAMPLES = 24
EVERY = -1


class Images(Dataset):
    """Noisy images, optionally with another pixel or label in a sample, or two samples swapped."""

    def __init__(self, pixel: int = -1, label: int = -1, swap: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
        if pixel >= 0:
            self.images[pixel, 0, 2, 3] = next_up(self.images[pixel, 0, 2, 3])
        if label >= 0:
            self.labels[label] = (self.labels[label] + 1) % 3
        if swap:
            self.images[list(swap)] = self.images[list(reversed(swap))]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand())  # noqa: NPY002
        # Scale by powers of two, so that rounding does not hide the changed pixel.
        return self.images[index] * 2.0 ** math.floor(4 * noise), self.labels[index]


class Conv(nn.Conv2d):
    """A convolution that can use another algorithm for the same result."""

    kernel = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernel == "unfold":
            columns = F.unfold(inputs.double(), 3, padding=1)
            result = self.weight.double().flatten(1) @ columns + self.bias.double()[:, None]
            return result.float().reshape(len(inputs), -1, 6, 6)
        return super().forward(inputs)


class Head(nn.Linear):
    """A linear layer that can sum in another order."""

    kernel = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kernel == "sum":
            return (inputs[:, None] * self.weight).flip(2).cumsum(2)[..., -1] + self.bias
        return super().forward(inputs)


class Net(nn.Sequential):
    def __init__(self) -> None:
        layers = (Conv(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1), nn.Dropout(0.2))
        super().__init__(*layers, nn.Flatten(), Head(144, 3))


class Loss(nn.CrossEntropyLoss):
    scale = 1.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) * self.scale


def next_up(value: Tensor) -> Tensor:
    return torch.nextafter(value, torch.tensor(math.inf))


class Fault(Hook):
    """Inject one fault at update `step` on rank `rank` (or EVERY one), then undo it.

    Args:
        kind: the name of a method of this class.
        where: path of a parameter, a buffer or a module, index of an item, or name of a generator.
    """

    def __init__(self, kind: str, step: int, where: str = "", rank: int = 0) -> None:
        self.kind, self.step, self.where = kind, step, where
        self.here = rank in (get_rank(), EVERY)
        self.undo: Callable[[], Any] = lambda: None

    def on_train_start(self, state: LoopState) -> None:
        if self.step == 0 and self.here and state.step == 0:
            self.weight(state)

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        after = self.kind in ("weight", "buffer")
        if state.step + 1 == self.step and self.here and not after:
            getattr(self, self.kind)(state, batch)

    def on_update(self, state: LoopState) -> None:
        self.undo()
        self.undo = lambda: None
        if state.step == self.step and self.here and self.kind in ("weight", "buffer"):
            getattr(self, self.kind)(state)

    # Data and random streams.

    def item(self, state: LoopState, batch: Any) -> None:
        tensor = batch[int(self.where)]
        tensor.view(-1)[5 % tensor.numel()] = 2

    def draw(self, state: LoopState, batch: Any) -> None:
        draws = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}
        draws[self.where]()

    def seed(self, state: LoopState, batch: Any) -> None:
        seeds = {"python": random.seed, "numpy": np.random.seed, "torch": torch.manual_seed}
        seeds[self.where](77)

    # The forward.

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        self.undo = lambda: setattr(owner, name, before)
        setattr(owner, name, value)

    def _layer(self, state: LoopState) -> Any:
        return state.model.module.get_submodule(self.where)

    def kernel(self, state: LoopState, batch: Any) -> None:
        layer = self._layer(state)
        self._set(layer, "kernel", "unfold" if isinstance(layer, Conv) else "sum")

    def slope(self, state: LoopState, batch: Any) -> None:
        self._set(self._layer(state), "negative_slope", 0.1000001)

    def eps(self, state: LoopState, batch: Any) -> None:
        self._set(self._layer(state), "eps", 1e-3)

    def no_dropout(self, state: LoopState, batch: Any) -> None:
        self._set(self._layer(state), "training", False)

    def loss(self, state: LoopState, batch: Any) -> None:
        self._set(state.model.module.loss, "scale", 1.0 + 1e-6)

    # Gradients.

    def gradient(self, state: LoopState, batch: Any) -> None:
        self._scale_gradient(state, 1.01)

    def zeroed(self, state: LoopState, batch: Any) -> None:
        self._scale_gradient(state, 0.0)

    def _scale_gradient(self, state: LoopState, factor: float) -> None:
        def scale(parameter: Tensor) -> None:
            parameter.grad *= factor

        parameter = state.model.module.get_parameter(self.where)
        self.undo = parameter.register_post_accumulate_grad_hook(scale).remove

    def unreduced(self, state: LoopState, batch: Any) -> None:
        self._set(state.model, "require_backward_grad_sync", False)

    # The update.

    def option(self, state: LoopState, batch: Any) -> None:
        group = state.optim_wrapper.optimizer.param_groups[0]
        before = group[self.where]
        self.undo = lambda: group.update({self.where: before})
        doubled = (
            tuple(value * 0.9 for value in before) if isinstance(before, tuple) else before * 2
        )
        group[self.where] = doubled

    def momentum(self, state: LoopState, batch: Any) -> None:
        parameter = state.model.module.get_parameter(self.where)
        state.optim_wrapper.optimizer.state[parameter]["exp_avg"].mul_(1.5)

    def statistics(self, state: LoopState, batch: Any) -> None:
        self._set(self._layer(state), "momentum", 0.11)

    def weight(self, state: LoopState) -> None:
        self._bump(state.model.module.get_parameter(self.where))

    def buffer(self, state: LoopState) -> None:
        # The running average of the next step could hide a single rounding.
        for _ in range(4):
            self._bump(state.model.module.get_buffer(self.where))

    @torch.no_grad()
    def _bump(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        flat[-1] = next_up(flat[-1]) if tensor.is_floating_point() else flat[-1] + 1
