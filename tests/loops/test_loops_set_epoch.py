"""``set_epoch`` reaches data sets, samplers and collators in every process that reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_parts import make_state
from marks import slow
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from stepwrap.loops import EpochTrainLoop, Hook, HookList, LoopState, build_loader

EPOCHS = 3
SAMPLES = 8


def read_sample(epoch: int, index: int) -> tuple[Tensor, int]:
    """Return a sample whose input holds the epoch and the index."""
    return torch.tensor([float(epoch), float(index), 0.0, 0.0]), 0


class EpochSamples(Dataset[Any]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return read_sample(self.epoch, index)


class EpochLines(IterableDataset[Any]):
    """A stream without a state, divided among workers."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (read_sample(self.epoch, index) for index in range(start, SAMPLES, step))


class StatefulLines(EpochLines):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Constant(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return read_sample(0, index)


class EpochCollator:
    """Writes the epoch into the batch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Any]) -> Any:
        inputs = torch.stack([inputs for inputs, _ in samples])
        inputs[:, 0] = self.epoch
        return inputs, torch.tensor([target for _, target in samples])


class EpochBatches(BatchSampler):
    """Yields the batches of the samples from the epoch's number on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch], [self.epoch]])


class Inputs(Hook):
    def __init__(self) -> None:
        self.by_epoch: list[Tensor] = []

    def on_epoch_start(self, state: LoopState) -> None:
        self.by_epoch.append(torch.zeros(0, 4))

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self.by_epoch[-1] = torch.cat([self.by_epoch[-1], batch[0]])


def train(loader: Any) -> list[Tensor]:
    """Return the inputs of each epoch."""
    hook = Inputs()
    EpochTrainLoop(loader, max_epochs=EPOCHS).run(make_state(), HookList([hook]))
    return hook.by_epoch


DATA: dict[str, Any] = {
    "stream": EpochLines,
    "stateful stream": StatefulLines,
    "samples": EpochSamples,
    "subset": lambda: ConcatDataset([Subset(EpochSamples(), range(SAMPLES))]),
}


@pytest.mark.parametrize(
    ("kind", "plain", "options"),
    [
        ("stream", False, {"num_workers": 2}),
        ("subset", False, {"num_workers": 1}),
        ("stream", True, {"num_workers": 1, "persistent_workers": True}),
        *slow(
            ("samples", False, {"num_workers": 0}),
            ("samples", False, {"num_workers": 2, "persistent_workers": False}),
            ("samples", False, {"num_workers": 2, "multiprocessing_context": "spawn"}),
            ("samples", True, {"num_workers": 2, "persistent_workers": True}),
            ("stateful stream", False, {"num_workers": 2}),
            ("stream", False, {"num_workers": 2, "multiprocessing_context": "spawn"}),
            ("stream", False, {"num_workers": 0}),
            ("stream", True, {"num_workers": 2}),
        ),
    ],
)
def test_data_sets_learn_the_number_of_each_pass(
    kind: str, plain: bool, options: dict[str, Any]
) -> None:
    make = DataLoader if plain else build_loader
    by_epoch = train(make(DATA[kind](), batch_size=2, **options))
    for epoch, inputs in enumerate(by_epoch):
        assert inputs[:, 0].tolist() == [epoch] * SAMPLES
        assert sorted(inputs[:, 1].tolist()) == list(range(SAMPLES))


@pytest.mark.parametrize("data", [Constant, *slow(EpochLines, StatefulLines)])
def test_collators_learn_the_number_of_each_pass(data: Any) -> None:
    loader = build_loader(data(), batch_size=2, num_workers=1, collate=EpochCollator())
    for epoch, inputs in enumerate(train(loader)):
        assert inputs[:, 0].tolist() == [epoch] * SAMPLES


def test_batch_samplers_learn_the_number_of_each_pass() -> None:
    batches = EpochBatches(SequentialSampler(range(SAMPLES)), 2, drop_last=False)
    for epoch, inputs in enumerate(train(DataLoader(Constant(), batch_sampler=batches))):
        assert inputs[:, 1].tolist() == [epoch, epoch]


def test_workers_continue_to_run_unless_the_setting_is_off() -> None:
    persistent = build_loader(EpochSamples(), batch_size=2, num_workers=1)
    assert persistent.persistent_workers
    options = {"num_workers": 1, "persistent_workers": False}
    assert not build_loader(EpochSamples(), batch_size=2, **options).persistent_workers
    # Without workers the setting has no effect.
    assert len(list(build_loader(EpochSamples(), batch_size=2, persistent_workers=True))) == 4
