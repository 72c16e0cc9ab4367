"""The references of the parity matrix: plain PyTorch on the whole batch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from parity_models import IGNORED, make_data, make_parts, micro_batch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_NORM = 0.2
# AdamW divides by sqrt(v) + eps: with eps = 1e-8 a gradient that is only rounding noise takes a
# whole step in a random direction.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.05}),
}
# The dtype of the weights by a recipe's dtype; the two half types are for autocast.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 1024.0


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, independent of its wrapper.

    Attributes:
        model: "transformer" or "cnn".
        dtype: "fp64", "fp32", or "bf16" and "fp16" for autocast over weights in fp32, the
            latter with a scaled loss.
        accumulate: micro-batches per step.
        clip: whether the gradients are clipped by their norm.
        optimizer: "SGD" or "AdamW".
        separate: whether each of the two parts has an optimizer and a norm for clipping.
        steps: number of updates.
        weight: whether losses are means over "samples" or "tokens", with micro-batches and parts of
            different sizes; "" if all have one size and count the same.
    """

    model: str
    dtype: str
    accumulate: int
    clip: bool
    optimizer: str
    separate: bool = False
    steps: int = 30
    weight: str = ""

    @property
    def micro_steps(self) -> int:
        return self.steps * self.accumulate

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.float32)

    @property
    def is_half(self) -> bool:
        return self.dtype in HALVES

    def __str__(self) -> str:
        clip = "clipped" if self.clip else "unclipped"
        weight = f" by {self.weight}" if self.weight else ""
        return f"{self.model} {self.dtype} {self.optimizer} x{self.accumulate} {clip}{weight}"


@dataclass(frozen=True)
class Reference:
    """The results of plain PyTorch: the loss of every micro-batch, and the final weights."""

    losses: Tensor
    weights: dict[str, Tensor]


def autocast(recipe: Recipe, device: str = "cpu") -> AbstractContextManager[Any]:
    """Return the context for the forward of a recipe."""
    if recipe.is_half:
        return torch.autocast(device, dtype=HALVES[recipe.dtype])
    return nullcontext()


def train_plain(recipe: Recipe, device: str = "cpu") -> Reference:
    """Train with torch's modules and optimizers in one process on one device."""
    dtype = recipe.weights_dtype
    modules = dict(zip(("body", "head"), make_parts(recipe.model, dtype), strict=True))
    net = nn.ModuleDict(modules).to(device)
    make, options = OPTIMIZERS[recipe.optimizer]
    groups = [list(module.parameters()) for module in modules.values()]
    if not recipe.separate:
        groups = [[param for group in groups for param in group]]
    optimizers = [make(group, **options) for group in groups]
    scaler = torch.amp.GradScaler(device, SCALE, enabled=recipe.dtype == "fp16")
    data = make_data(recipe.model, dtype, padded=recipe.weight == "tokens")
    batches = [micro_batch(data, i, ragged=bool(recipe.weight)) for i in range(recipe.micro_steps)]
    weights = [get_weight(recipe, target) for _, target in batches]
    losses = []
    for index, batch in enumerate(batches):
        inputs, target = (tensor.to(device) for tensor in batch)
        start = index - index % recipe.accumulate
        share = weights[index] / sum(weights[start : start + recipe.accumulate])
        with autocast(recipe, device):
            scores = net["head"](net["body"](inputs))
            loss = F.cross_entropy(scores, target.flatten())
        scaler.scale(loss * share).backward()
        losses.append(loss.detach())
        if (index + 1) % recipe.accumulate == 0:
            for group, optimizer in zip(groups, optimizers, strict=True):
                if recipe.clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(group, MAX_NORM)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    values = {name: value.cpu() for name, value in net.state_dict().items()}
    return Reference(torch.stack(losses).double().cpu(), values)


def get_weight(recipe: Recipe, target: Tensor) -> int:
    """Return the weight of a micro-batch in its update."""
    if recipe.weight == "tokens":
        return int((target != IGNORED).sum())
    return len(target) if recipe.weight else 1
