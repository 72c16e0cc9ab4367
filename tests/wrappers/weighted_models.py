"""A model of ragged sequences, its global batches, and plain PyTorch training on them."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from parity_cells import KINDS, make_mesh, whole_weights
from torch import Tensor, nn
from torch.nn import functional as F

from stepwrap.registry import MODEL_WRAPPERS
from stepwrap.wrappers import AmpOptimWrapper, BaseModel, OptimWrapper, Preparation, wrap_model

SAMPLES, LENGTH, FEATURES, CLASSES = 16, 5, 6, 3
IGNORED = -100
CLIP = {"max_norm": 0.05}

Batch = dict[str, Tensor]


class Tagger(BaseModel):
    """A model that tags every place of a sequence; its loss is a mean over `counted`."""

    def __init__(self, counted: str = "tokens", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counted = counted
        self.first = nn.Sequential(nn.Linear(FEATURES, 8, dtype=dtype), nn.Tanh())
        self.second = nn.Linear(8, CLASSES, dtype=dtype)

    def forward(self, inputs: Tensor, labels: Tensor, mask: Tensor, mode: str = "loss") -> Any:
        scores = self.second(self.first(inputs))
        if self.counted == "tokens":
            return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten())}
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        if self.counted == "samples":
            return {"loss": losses.mean()}
        return {"loss": (losses * mask).sum() / mask.sum()}


def count_of_mask(batch: Batch) -> Tensor:
    return batch["mask"].sum()


# The `loss_weight` setting for each `counted`.
SETTINGS: dict[str, Any] = {
    "samples": "samples",
    "tokens": "tokens",
    "mask": {"key": "mask"},
    "own": f"{__name__}.count_of_mask",
}


def global_batch(update: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Return the samples of an update; all labels of some samples are ignored."""
    generator = torch.Generator().manual_seed(100 + update)
    inputs = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
    labels[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5] = IGNORED
    labels[:3] = IGNORED
    mask = torch.rand(SAMPLES, LENGTH, generator=generator, dtype=torch.float64) + 0.1
    return {"inputs": inputs.to(dtype), "labels": labels, "mask": mask.to(dtype)}


def split(batch: Batch, num_pieces: int, seed: int) -> list[Batch]:
    """Split a global batch into pieces of unequal sizes with at least one sample."""
    cuts = sorted(random.Random(seed).sample(range(1, SAMPLES), num_pieces - 1))
    bounds = [0, *cuts, SAMPLES]
    ranges = zip(bounds, bounds[1:], strict=False)
    return [{key: value[a:b] for key, value in batch.items()} for a, b in ranges]


def train_whole(
    counted: str, updates: int, dtype: torch.dtype = torch.float64, *, clip: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on whole batches in plain PyTorch; return the weights and each update's loss."""
    model = Tagger(counted, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for update in range(updates):
        loss = model(**global_batch(update, dtype))["loss"]
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), **CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: value.detach() for name, value in model.state_dict().items()}, losses


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a weight; infinity for a NaN."""
    largest = max(
        (actual[name].cpu() - value).abs().max().item() for name, value in expected.items()
    )
    return largest if largest == largest else float("inf")  # noqa: PLR0124


DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-2}
PLAN = {"first.0": "colwise", "second": "rowwise"}


@dataclass(frozen=True)
class Weighted:
    """How a global batch is trained in pieces.

    Attributes:
        counted: the unit of the loss's mean, a key of `SETTINGS`.
        dtype: "fp64" or "fp32"; "bf16" and "fp16" under autocast over weights in fp32.
        accumulate: micro-batches per update on each rank.
        clip: whether gradients are clipped by their norm.
        updates: number of global batches.
    """

    counted: str = "tokens"
    dtype: str = "fp64"
    accumulate: int = 3
    clip: bool = False
    updates: int = 3

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.float32)


@dataclass(frozen=True)
class Apart:
    """The largest differences from whole batches in plain PyTorch."""

    cell: Weighted
    weights: float
    losses: float

    def __str__(self) -> str:
        return f"{self.cell}: {self.weights:.1e}, loss {self.losses:.1e}"

    @property
    def is_within(self) -> bool:
        """Return whether they are within the bound; a NaN is not."""
        bound = BOUNDS[self.cell.dtype]
        return self.weights <= bound and self.losses <= bound


def all_cells(counted: Iterable[str] = SETTINGS) -> list[Weighted]:
    dtypes = [*DTYPES, *HALVES]
    return [
        Weighted(*options) for options in itertools.product(counted, dtypes, (1, 3), (False, True))
    ]


def run_weighted(kind: str, cells: list[Weighted], device: str = "cpu") -> list[Apart]:
    """Train the cells under a wrapper; every rank must call this."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh(kind, world, device)
    distances = []
    for cell in cells:
        wrapper = wrapped(kind, Tagger(cell.counted, cell.weights_dtype), mesh, device)
        losses = train(wrapper, get_optimizer(wrapper, cell), cell, mesh)
        weights, plain = train_whole(cell.counted, cell.updates, cell.weights_dtype, clip=cell.clip)
        largest = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        distances.append(Apart(cell, difference(whole_weights(wrapper), weights), largest))
    return distances


def wrapped(kind: str, model: nn.Module, mesh: Any, device: str = "cpu", **options: Any) -> Any:
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


def get_optimizer(wrapper: nn.Module, cell: Weighted) -> OptimWrapper:
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.5, momentum=0.9)
    clip = CLIP if cell.clip else None
    setting = SETTINGS[cell.counted]
    if cell.dtype not in HALVES:
        return OptimWrapper(optimizer, cell.accumulate, clip, loss_weight=setting)
    half = {"dtype": HALVES[cell.dtype], "loss_scale": {"init_scale": 1024.0}}
    return AmpOptimWrapper(optimizer, cell.accumulate, clip, loss_weight=setting, **half)


def get_micro_batches(cell: Weighted, update: int, mesh: Any) -> list[Batch]:
    batch = global_batch(update, cell.weights_dtype)
    micro_batches = split(batch, cell.accumulate * mesh.data_size, seed=update)
    return micro_batches[mesh.data_rank :: mesh.data_size]


def train(wrapper: Any, optim_wrapper: OptimWrapper, cell: Weighted, mesh: Any) -> list[float]:
    """Train; return each update's loss, averaged over pieces and ranks by weight."""
    losses = []
    for update in range(cell.updates):
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in get_micro_batches(cell, update, mesh):
            loss = wrapper.train_step(batch, optim_wrapper)["loss"]
            weight = float(optim_wrapper.last_weight)  # type: ignore[arg-type]
            # The mean of nothing is NaN.
            sums[0] += loss.item() * weight if weight else 0.0
            sums[1] += weight
        if dist.is_initialized():
            dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    return losses
