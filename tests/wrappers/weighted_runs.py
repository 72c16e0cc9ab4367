"""Global batches in unequal pieces over ranks and micro-batches, under every wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from parity_cells import KINDS, make_mesh, whole_weights
from torch import nn
from weighted_models import CLIP, SETTINGS, Batch, Tagger, difference, global_batch, split
from weighted_models import train_whole as train_plain

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import AmpOptimWrapper, OptimWrapper, Preparation, wrap_model

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-2}
PLAN = {"first.0": "colwise", "second": "rowwise"}


@dataclass(frozen=True)
class Weighted:
    """How a global batch is trained in pieces.

    Attributes:
        counted: what the loss is a mean over, a key of `SETTINGS`.
        dtype: "fp64" or "fp32"; "bf16" and "fp16" under autocast over weights in fp32.
        accumulate: micro-batches of an update, on each rank.
        clip: whether gradients are clipped by their norm.
        updates: how many global batches.
    """

    counted: str = "tokens"
    dtype: str = "fp64"
    accumulate: int = 3
    clip: bool = False
    updates: int = 3

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of parameters."""
        return DTYPES.get(self.dtype, torch.float32)


@dataclass(frozen=True)
class Apart:
    """What came out: the largest differences to whole batches in plain PyTorch."""

    cell: Weighted
    weights: float
    losses: float

    def __str__(self) -> str:
        return f"{self.cell}: {self.weights:.1e}, loss {self.losses:.1e}"

    @property
    def is_within(self) -> bool:
        """Whether they keep to the bound; a NaN does not."""
        bound = BOUNDS[self.cell.dtype]
        return self.weights <= bound and self.losses <= bound


def all_cells(counted: Iterable[str] = SETTINGS) -> list[Weighted]:
    """Every combination."""
    dtypes = [*DTYPES, *HALVES]
    return [Weighted(*one) for one in itertools.product(counted, dtypes, (1, 3), (False, True))]


def run_weighted(kind: str, cells: list[Weighted], device: str = "cpu") -> list[Apart]:
    """Train the cells under a wrapper; every rank must call this."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(kind, world, device)
    found = []
    for cell in cells:
        wrapper = wrapped(kind, Tagger(cell.counted, cell.weights_dtype), mesh, device)
        losses = train(wrapper, optimizer_of(wrapper, cell), cell, mesh)
        weights, plain = train_plain(cell.counted, cell.updates, cell.weights_dtype, clip=cell.clip)
        largest = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        found.append(Apart(cell, difference(whole_weights(wrapper), weights), largest))
    return found


def wrapped(kind: str, model: nn.Module, mesh: Any, device: str = "cpu", **options: Any) -> Any:
    """Wrap the model as a row of the parity matrix says."""
    row = KINDS[kind]
    if row.wrapper == "dp":
        options["device_ids"] = [device, device]
    if row.wrapper == "fsdp":
        options["shard"] = ["first"]
    if row.wrapper == "fsdp" or row.is_tensor_parallel:
        options["mesh"] = mesh
    if row.is_tensor_parallel:
        options["prepare"] = Preparation(tensor_parallel=PLAN)
    return wrap_model(MODEL_WRAPPERS.get(row.wrapper), model, device=device, **options)


def optimizer_of(wrapper: nn.Module, cell: Weighted) -> OptimWrapper:
    """The optimizer wrapper of a cell."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.5, momentum=0.9)
    clip = CLIP if cell.clip else None
    setting = SETTINGS[cell.counted]
    if cell.dtype not in HALVES:
        return OptimWrapper(optimizer, cell.accumulate, clip, loss_weight=setting)
    half = {"dtype": HALVES[cell.dtype], "loss_scale": {"init_scale": 1024.0}}
    return AmpOptimWrapper(optimizer, cell.accumulate, clip, loss_weight=setting, **half)


def pieces_of(cell: Weighted, update: int, mesh: Any) -> list[Batch]:
    """The micro-batches of this rank in an update."""
    batch = global_batch(update, cell.weights_dtype)
    pieces = split(batch, cell.accumulate * mesh.data_size, seed=update)
    return pieces[mesh.data_rank :: mesh.data_size]


def train(wrapper: Any, optim_wrapper: OptimWrapper, cell: Weighted, mesh: Any) -> list[float]:
    """Train; returns the loss of every update, averaged over pieces and ranks by weight."""
    losses = []
    for update in range(cell.updates):
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in pieces_of(cell, update, mesh):
            loss = wrapper.train_step(batch, optim_wrapper)["loss"]
            weight = float(optim_wrapper.last_weight)  # type: ignore[arg-type]
            # A mean over nothing is a NaN.
            sums[0] += loss.item() * weight if weight else 0.0
            sums[1] += weight
        if dist.is_initialized():
            dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    return losses
