"""Runs in which some samples have wild targets, for tests of skipped steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from stepwrap.collectives import get_rank
from stepwrap.loops import EpochTrainLoop, HookList, LoopState, build_loader, mix_seed, seed_rng
from stepwrap.wrappers import (
    OptimWrapper,
    SingleDevice,
    StepDistributedDataParallel,
    StepFullyShardedDataParallel,
    SupervisedModel,
)

BATCH = 4


class Spiky(Dataset[Any]):
    """A noisy regression; reading a sample draws random numbers.

    `wild` replaces targets of samples, `without` removes samples.
    """

    def __init__(
        self, size: int, wild: dict[int, float] | None = None, without: Iterable[int] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)
        for index, target in (wild or {}).items():
            self.targets[index] = target
        gone = set(without)
        self.there = [index for index in range(size) if index not in gone]

    def __len__(self) -> int:
        return len(self.there)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = self.there[index]
        return self.inputs[at] + 0.1 * torch.randn(6), self.targets[at]


def get_samples(steps: Collection[int], world_size: int, accumulate: int = 1) -> list[int]:
    """Return the samples of all ranks in these steps (from 1) of an unshuffled epoch."""
    size = BATCH * world_size * accumulate
    return [index for step in steps for index in range((step - 1) * size, step * size)]


def sample_at(step: int, rank: int, world_size: int, accumulate: int = 1, batch: int = 0) -> int:
    """Return a sample that a rank reads in a batch of a step."""
    return ((step - 1) * accumulate + batch) * BATCH * world_size + rank


def make_loader(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return build_loader(data, batch_size=BATCH, train=True, **options)


def make_state(
    kind: str = "ddp", *, run_dir: Path | None = None, optim: Any = OptimWrapper, **options: Any
) -> LoopState:
    """Return a state: a net with batch norm and dropout, AdamW; random streams differ by rank."""
    seed_rng(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    )
    model = SupervisedModel(net, nn.MSELoss())
    wrapper: Any = SingleDevice
    if dist.is_initialized():
        wrapper = StepFullyShardedDataParallel if kind == "fsdp" else StepDistributedDataParallel
    wrapped = wrapper(model)
    seed_rng(mix_seed(0, get_rank()))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    return LoopState(model=wrapped, optim_wrapper=optim(optimizer, **options), run_dir=run_dir)


def train(
    state: LoopState, data: Dataset[Any], hooks: Iterable[Any] = (), **options: Any
) -> LoopState:
    """Train for an epoch; stateful hooks are added to the state."""
    hooks = list(hooks)
    state.stateful = {type(h).__name__: h for h in hooks if hasattr(h, "state_dict")}
    loader = options.pop("loader", None) or make_loader(data)
    loop = EpochTrainLoop(loader, **{"max_epochs": 1, "log_every_steps": 5, **options})
    return loop.run(state, HookList(hooks))


def flatten(state: LoopState) -> dict[str, Any]:
    """Return copies of weights, buffers, optimizer state and this rank's random stream."""
    entries: dict[str, Any] = {n: v.detach() for n, v in state.model.state_dict().items()}
    for index, slot in state.optim_wrapper.state_dict()["state"].items():
        entries |= {f"{index}.{name}": value for name, value in slot.items()}
    tensors = {n: v for n, v in entries.items() if isinstance(v, Tensor)}
    tensors = {n: v.to_local() if hasattr(v, "to_local") else v for n, v in tensors.items()}
    return {n: v.clone() for n, v in tensors.items()} | {"stream": torch.get_rng_state()}


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of all values that differ in any bit."""
    assert actual.keys() == expected.keys()
    return [name for name, value in actual.items() if not torch.equal(value, expected[name])]
