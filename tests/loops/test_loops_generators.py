"""A resumed run draws the order and the samples of an uninterrupted one from any generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_parts import assert_identical, get_weights, make_data, make_state
from ranks import run_ranks
from stream_parts import SaveAll
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stepwrap.loops import EpochTrainLoop, HookList, LoopState, build_loader, load_checkpoint
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

SAMPLES = 22


class Rotated(Sampler[int]):
    """An order that continues from pass to pass, drawn from a generator of its own."""

    def __init__(self) -> None:
        self.draws = random.Random(5)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield self.draws.randrange(SAMPLES)


class Augmented(Dataset[Any]):
    """Samples with noise from a generator of the data set."""

    def __init__(self, noise: Any) -> None:
        self.data = make_data(SAMPLES)
        self.transforms = [{"noise": noise}]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        noise = self.transforms[0]["noise"]
        if isinstance(noise, torch.Generator):
            return inputs + torch.rand(4, generator=noise), target
        if isinstance(noise, random.Random):
            return inputs + noise.random(), target
        return inputs + float(noise.normal()), target


class Stream(IterableDataset[Any]):
    """A stream without a state, whose order is drawn from a generator."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(2)

    def __iter__(self) -> Iterator[Any]:
        data = make_data(SAMPLES)
        for index in self.draws.permutation(SAMPLES).tolist():
            yield data[index]


class OwnLoader:
    def __init__(self) -> None:
        self._draws = np.random.RandomState(3)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield make_data(SAMPLES)[self._draws.randint(SAMPLES, size=4).tolist()]


class Doubled(DataLoader[Any]):
    """A subclass that changes the batches of a sequential order."""

    def __iter__(self) -> Any:
        for inputs, target in super().__iter__():
            yield inputs * 2, target


def make_loader(kind: str) -> Any:
    data, weights = make_data(SAMPLES), torch.arange(1.0, SAMPLES + 1).tolist()
    generator = torch.Generator().manual_seed(7)
    noisy: dict[str, Any] = {
        "subset": Subset(Augmented(np.random.default_rng(1)), range(3, 20)),
        "own generator": Augmented(random.Random(4)),
        "stream": Stream(),
    }
    options: dict[str, dict[str, Any]] = {
        "global": {"shuffle": True},
        "generator": {"shuffle": True, "generator": generator},
        "workers": {"shuffle": True, "generator": generator, "num_workers": 2},
        "persistent": {"shuffle": True, "generator": generator},
        "persistent, global": {"shuffle": True},
        "weighted": {"sampler": WeightedRandomSampler(weights, SAMPLES, generator=generator)},
        "replaced": {"sampler": RandomSampler(data, True, 70, generator=generator)},
        "own sampler": {"sampler": Rotated()},
        "subset": {"shuffle": True, "generator": generator},
        "own generator": {"shuffle": True},
        "stream": {},
    }
    if kind == "batch sampler":
        sampler = BatchSampler(SubsetRandomSampler(range(2, SAMPLES), generator), 3, True)
        return DataLoader(data, batch_sampler=sampler)
    if kind == "build_loader":
        return build_loader(Augmented(generator), batch_size=4, train=True, shuffle=True)
    if kind == "build_loader, workers":
        return build_loader(data, batch_size=4, train=True, shuffle=True, num_workers=1)
    if kind == "subclass":
        return Doubled(data, batch_size=4)
    if kind == "own loader":
        return OwnLoader()
    workers = {"num_workers": 2, "persistent_workers": True} if "persistent" in kind else {}
    return DataLoader(noisy.get(kind, data), batch_size=4, **options[kind], **workers)


def train(kind: str, hook: SaveAll, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    state = make_state(dropout=0.5)
    loop = EpochTrainLoop(make_loader(kind), max_epochs=3)
    if checkpoint is not None:
        load_checkpoint(checkpoint).restore(state)
    loop.run(state, HookList([hook]))
    generators = state.data.generators.state_dict()
    states = {f"{when}.{path}": s for when, ss in generators.items() for path, s in ss.items()}
    tensors = {path: value for path, value in states.items() if isinstance(value, torch.Tensor)}
    return {**get_weights(state), **tensors}


def resume_everywhere(folder: Path, kind: str) -> None:
    hook = SaveAll(folder)
    weights = train(kind, hook)
    assert len(hook.saved) >= 6
    for iteration, path in hook.saved:
        resumed = SaveAll()
        assert_identical(train(kind, resumed, path), weights)
        remaining = hook.read[iteration:]
        assert len(resumed.read) == len(remaining)
        for actual, expected in zip(resumed.read, remaining, strict=True):
            assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    "kind",
    [
        *("global", "generator", "workers", "persistent", "persistent, global", "weighted"),
        *("replaced", "batch sampler", "own sampler", "subset", "own generator"),
        *("build_loader", "build_loader, workers", "stream", "subclass", "own loader"),
    ],
)
def test_a_resumed_run_reads_what_an_uninterrupted_run_reads(tmp_path: Path, kind: str) -> None:
    """Inside a pass and at its end; the order of each pass is drawn from a generator."""
    resume_everywhere(tmp_path, kind)


class OwnDropout(nn.Module):
    """Dropout that draws from a generator of the module."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        if isinstance(self.generator, torch.Generator):
            return inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2)
        return inputs * (self.generator.random() > 0.2)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_generators_of_modules_continue(tmp_path: Path, kind: str) -> None:
    def make() -> LoopState:
        torch.manual_seed(0)
        generators = {"torch": torch.Generator(), "python": random.Random(1)}
        dropout = OwnDropout(generators.get(kind, np.random.default_rng(1)))
        model = SupervisedModel(nn.Sequential(nn.Linear(4, 3), dropout), nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return LoopState(model=SingleDevice(model), optim_wrapper=OptimWrapper(optimizer))

    def loop() -> EpochTrainLoop:
        return EpochTrainLoop(make_loader("build_loader"), max_epochs=2)

    hook, state = SaveAll(tmp_path), make()
    loop().run(state, HookList([hook]))
    for _, path in hook.saved[::3]:
        resumed = make()
        load_checkpoint(path).restore(resumed)
        loop().run(resumed, HookList())
        assert_identical(get_weights(resumed), get_weights(state))


def test_a_resumed_run_draws_the_order_of_a_loader_that_ranks_share(tmp_path: Path) -> None:
    run_ranks(resume_everywhere, 2, tmp_path, "generator")


def test_generators_of_persistent_workers_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(checkpoint: Path | None) -> Path:
        noisy = Augmented(np.random.default_rng(1))
        loader = build_loader(noisy, batch_size=4, train=True, num_workers=1)
        state, hook = make_state(), SaveAll(tmp_path)
        if checkpoint is not None:
            load_checkpoint(checkpoint).restore(state)
        EpochTrainLoop(loader, max_epochs=2).run(state, HookList([hook]))
        return hook.saved[0][1]

    path = run(None)
    assert "num_workers=0" not in caplog.text
    run(path)
    assert "transforms.0.noise" in caplog.text
    assert "num_workers=0" in caplog.text
