"""The checkpoints of the parity matrix, loaded under every row and number of ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from parity_cells import Outcome, make_mesh, make_wrapper, validation_loss
from ranks import run_ranks

from stepwrap.loops import load_checkpoint

# Of the validation loss, relative; weights trained under autocast are stored, and loaded, in fp32.
LOAD_BOUNDS = {"fp64": 1e-12, "fp32": 2e-6, "bf16": 2e-6, "fp16": 2e-6}


@dataclass(frozen=True)
class Load:
    """A checkpoint of `source`, loaded under a row and number of ranks.

    Attributes:
        difference: of the validation loss to the one where it was saved, relative.
    """

    kind: str
    world: int
    source: Outcome
    difference: float

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was saved by another row or number of ranks."""
        return (self.kind, self.world) != (self.source.kind, self.source.world)

    @property
    def is_within(self) -> bool:
        """Whether it keeps to the bound of its dtype; a NaN does not."""
        return self.difference <= LOAD_BOUNDS[self.source.recipe.dtype]


def load_all(kind: str, world: int, sources: list[Outcome], timeout_s: float = 300.0) -> list[Load]:
    """Load all that saved a checkpoint under one row and number of ranks.

    Raises:
        RanksError: a rank failed.
    """
    groups: dict[tuple[str, torch.dtype], list[Outcome]] = defaultdict(list)
    for one in (one for one in sources if one.checkpoint is not None):
        groups[one.recipe.model, one.recipe.weights_dtype].append(one)
    loads = []
    for (model, dtype), group in groups.items():
        paths = [one.checkpoint for one in group]
        by_rank = run_ranks(evaluate, world, kind, model, dtype, paths, timeout_s=timeout_s)
        for source, *losses in zip(group, *by_rank, strict=True):
            apart = max(abs(loss - source.validation) for loss in losses)
            loads.append(Load(kind, world, source, apart / abs(source.validation)))
    return loads


def evaluate(
    kind: str, model: str, dtype: torch.dtype, paths: list[Path], device: str = "cpu"
) -> list[float]:
    """Load one checkpoint after the other into one wrapper; every rank must call this."""
    mesh = make_mesh(kind, dist.get_world_size() if dist.is_initialized() else 1, device)
    wrapper = make_wrapper(kind, model, dtype, mesh=mesh, device=device)
    losses = []
    for path in paths:
        load_checkpoint(path).load_model(wrapper)
        losses.append(validation_loss(wrapper, model, dtype, mesh, device))
    return losses
