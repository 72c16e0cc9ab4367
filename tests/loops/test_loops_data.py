"""The order of the data: shards, positions, workers, other loaders."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import slow
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from stepwrap.loops import ShardedBatchSampler, build_loader
from stepwrap.loops.data.loaders import batches_from
from stepwrap.runner.rank_processes import is_running

SHAPES = {"samples": st.integers(1, 60), "size": st.integers(1, 7), "world": st.integers(1, 4)}


def shards(samples: int, size: int, world: int, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each rank in epoch 3."""
    by_rank = []
    for rank in range(world):
        sampler = ShardedBatchSampler(
            samples, size, shuffle=True, seed=5, rank=rank, world_size=world, **options
        )
        sampler.set_position(3)
        batches = [list(batch) for batch in sampler]
        assert len(batches) == len(sampler)
        by_rank.append(batches)
    return by_rank


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_evaluation_has_each_sample_exactly_once(samples: int, size: int, world: int) -> None:
    by_rank = shards(samples, size, world, even=False)
    indices = [index for batches in by_rank for batch in batches for index in batch]
    assert sorted(indices) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_training_has_equal_shares_of_all_samples(samples: int, size: int, world: int) -> None:
    by_rank = shards(samples, size, world)
    lengths = [[len(batch) for batch in batches] for batches in by_rank]
    assert all(length == lengths[0] for length in lengths)
    indices = [index for batches in by_rank for batch in batches for index in batch]
    assert set(indices) == set(range(samples))
    assert len(indices) == -(-samples // world) * world


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_global_batches_are_consecutive_pieces_of_one_order(
    samples: int, size: int, world: int
) -> None:
    order = [index for batch in shards(samples, 1, 1)[0] for index in batch]
    by_rank = shards(samples, size, world)
    full_batches = samples // (size * world)
    for k in range(full_batches):
        together = sorted(index for batches in by_rank for index in batches[k])
        assert together == sorted(order[k * size * world : (k + 1) * size * world])


def test_drop_last_leaves_full_global_batches() -> None:
    assert [len(batches) for batches in shards(23, 3, 2, drop_last=True)] == [3, 3]
    with pytest.raises(ValueError, match="drop_last leaves no batch"):
        shards(5, 3, 2, drop_last=True)


def test_ranks_may_have_no_batch_at_all() -> None:
    assert [len(batches) for batches in shards(2, 4, 3, even=False)] == [1, 1, 0]


def test_epochs_differ_and_come_back() -> None:
    sampler = ShardedBatchSampler(50, 5, shuffle=True, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_position(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != list(ShardedBatchSampler(50, 5, shuffle=True, seed=2))


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"rank": 2, "world_size": 2}])
def test_bad_numbers_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ShardedBatchSampler(10, **{"batch_size": 2, **bad}, shuffle=False)


class Noisy(Dataset[Any]):
    """A data set that draws from every random stream that an augmentation may use."""

    def __init__(self, samples: int = 12) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        self.read.append(index)
        return index, random.random(), torch.rand(()).item()


def batches_as_lists(loader: Any, epoch: int, batch: int = 0) -> list[list[list[float]]]:
    return [
        [tensor.tolist() for tensor in tensors] for tensors in batches_from(loader, epoch, batch)
    ]


def noisy_loader(num_workers: int) -> DataLoader[Any]:
    return build_loader(
        Noisy(), batch_size=2, train=True, shuffle=True, seed=3, num_workers=num_workers
    )


def test_workers_repeat_their_augmentations_whatever_their_number() -> None:
    two = noisy_loader(2)
    reference = batches_as_lists(two, epoch=1)
    assert batches_as_lists(two, epoch=1, batch=4) == reference[4:]
    assert batches_as_lists(noisy_loader(1), epoch=1) == reference
    assert batches_as_lists(two, epoch=2) != reference
    indices = [tensors[0] for tensors in reference]
    assert [tensors[0] for tensors in batches_as_lists(noisy_loader(0), epoch=1)] == indices


def test_a_position_is_reached_without_reading_or_drawing() -> None:
    dataset = Noisy()
    loader = build_loader(dataset, batch_size=2, train=True, shuffle=True)
    reference = [tensors[0].tolist() for tensors in batches_from(loader, 1)]
    dataset.read.clear()
    before = torch.get_rng_state()
    remaining = batches_from(loader, 1, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert [tensors[0].tolist() for tensors in remaining] == reference[4:]
    assert len(dataset.read) == 4


class Counting(Sampler[int]):
    """A user's sampler whose order depends on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 8 for index in range(8)])


def test_a_loader_with_a_sampler_that_knows_the_epoch_is_skipped_by_index() -> None:
    dataset = Noisy(8)
    loader = DataLoader(dataset, batch_size=2, sampler=Counting())
    before = torch.get_rng_state()
    remaining = batches_from(loader, 3, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [tensors[0].tolist() for tensors in remaining] == [[7, 0], [1, 2]]
    assert dataset.read == [7, 0, 1, 2]


def test_lists_are_skipped_by_index_and_no_batch_follows_the_last() -> None:
    assert list(batches_from(["a", "b", "c"], 0, 2)) == ["c"]
    assert list(batches_from(noisy_loader(0), 0, 6)) == []


def test_other_iterables_are_read_up_to_the_place_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Noisy(8), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        remaining = batches_from(loader, 0, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(remaining)) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "by reading and discarding 3 batches" in caplog.text


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_iterable_data_sets_load_but_do_not_shuffle() -> None:
    loader = build_loader(Stream(), batch_size=2)
    assert [batch.tolist() for batch in batches_from(loader, 0)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="shuffle must .*false for Stream"):
        build_loader(Stream(), batch_size=2, shuffle=True)


def test_an_empty_data_set_is_named() -> None:
    with pytest.raises(ValueError, match="Noisy is empty"):
        build_loader(Noisy(0), batch_size=2)


class Collator:
    """A collator with a length, which is falsy."""

    def __len__(self) -> int:
        return 0

    def __call__(self, samples: list[Any]) -> str:
        return "collated"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collator_may_have_a_length(num_workers: int) -> None:
    loader = build_loader(
        Noisy(), batch_size=5, collate=Collator(), num_workers=num_workers, shard=(0, 1)
    )
    assert set(loader) == {"collated"}


def test_loader_options_pass_through_and_unknown_ones_do_not() -> None:
    loader = build_loader(Noisy(), batch_size=5, drop_last=True, collate=len, shard=(1, 2))
    assert list(loader) == [5]
    assert loader.pin_memory == torch.cuda.is_available()
    with pytest.raises(TypeError, match="pass seed, not generator"):
        build_loader(Noisy(4), batch_size=2, generator=torch.Generator())
    with pytest.raises(TypeError, match="takes no collate_fn: pass collate"):
        build_loader(Noisy(4), batch_size=2, collate_fn=len)
    with pytest.raises(TypeError, match="prefetch_facto"):
        build_loader(Noisy(), batch_size=2, prefetch_facto=2)


class Readers(Dataset[Any]):
    """A data set of the process ids of its reader and of the reader's parent."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[int]:
        return [os.getpid(), os.getppid()]


@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGUSR1, "fork"),
        *slow((signal.SIGINT, "fork"), (signal.SIGTERM, "spawn"), (signal.SIGTERM, "forkserver")),
    ],
)
def test_workers_survive_a_signal_to_the_group(number: signal.Signals, method: str) -> None:
    options: dict[str, Any] = {"prefetch_factor": 1, "multiprocessing_context": method}
    loader = build_loader(Readers(), batch_size=1, num_workers=2, **options)
    batches = (tuple(map(int, batch)) for batch in batches_from(loader, 0))
    readers = {next(batches), next(batches)}
    assert len(readers) == 2
    # The parent of the workers may be a fork server.
    for process in {process for reader in readers for process in reader} - {os.getpid()}:
        os.kill(process, number)
    assert set(batches) == readers


_LINGERING = """
from torch.utils.data import TensorDataset
import torch
from stepwrap.loops import build_loader
loader = build_loader(TensorDataset(torch.zeros(8)), batch_size=1, num_workers=2)
batches = iter(loader)
next(batches)
"""


@pytest.mark.slow
def test_workers_in_use_do_not_hold_up_the_exit() -> None:
    """The exit sends them SIGTERM and waits for them."""
    subprocess.run([sys.executable, "-c", _LINGERING], check=True, timeout=60)


_KILLED = """
import os, signal, time
import torch
from torch.utils.data import TensorDataset
from stepwrap.loops import build_loader

def wait_for_the_end(worker):
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)

options = {"batch_size": 1, "num_workers": 1, "worker_init_fn": wait_for_the_end}
next(iter(build_loader(TensorDataset(torch.zeros(8)), **options)))
"""


@pytest.mark.slow
def test_a_worker_that_is_prepared_for_a_dead_process_ends() -> None:
    # The worker also holds the other end of the pipe.
    words = [sys.executable, "-c", _KILLED]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


_BUSY = """
import os, signal, sys, time
from pathlib import Path
from stepwrap.loops import build_loader

class Slow:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        Path("worker").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

next(iter(build_loader(Slow(), batch_size=1, num_workers=1)))
"""


@pytest.mark.slow
def test_a_worker_ends_with_its_process_even_while_it_reads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _BUSY], cwd=tmp_path, check=False, timeout=60)
    worker = int((tmp_path / "worker").read_text())
    limit = time.monotonic() + 60
    while is_running(worker):
        assert time.monotonic() < limit
        time.sleep(0.01)


class Marked:
    """A user's worker_init_fn that creates a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        (self.folder / str(worker)).touch()


def test_the_users_preparation_of_workers_is_called(tmp_path: Path) -> None:
    loader = build_loader(Readers(), batch_size=8, num_workers=2, worker_init_fn=Marked(tmp_path))
    assert len(list(loader)) == 5
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}


class Holder:
    """Holds any object, like a transform."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


class Holding(Noisy):
    def __init__(self, transform: Any) -> None:
        super().__init__(4)
        self.transform = transform


@pytest.mark.parametrize("method", ["spawn", *slow("forkserver")])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_cannot_be_sent_to_a_worker_is_named(method: str) -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": method}
    with open(__file__) as file:
        cases: list[tuple[Any, Any, str]] = [
            (
                Holding(Holder(lambda x: x)),
                None,
                r"dataset\.transform\.fn is a lambda \(.*data.py:",
            ),
            (Holding({"a": [file]}), None, r"dataset\.transform\['a'\]\[0\] is an open file"),
            (Noisy(4), lambda samples: samples, r"collate is a lambda"),
        ]
        for dataset, collate, text in cases:
            loader = build_loader(dataset, collate=collate, **options)
            with pytest.raises(TypeError, match=text) as caught:
                next(batches_from(loader, 0))
            assert "num_workers to 0" in str(caught.value)


def test_fewer_samples_than_ranks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    build_loader(Noisy(2), batch_size=4, train=True, shard=(0, 3))
    assert "2 samples for 3 ranks" in caplog.text
    caplog.clear()
    build_loader(Noisy(2), batch_size=4, shard=(0, 3))
    build_loader(Noisy(3), batch_size=4, train=True, shard=(0, 3))
    assert not caplog.text
