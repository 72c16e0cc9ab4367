"""Batches selected from tensors in memory equal a DataLoader's batches bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_parts import assert_identical, get_weights, make_data, make_state
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from stepwrap.loops import (
    EpochTrainLoop,
    HookList,
    MeanLoss,
    ShardedBatchSampler,
    ValLoop,
    build_loader,
)
from stepwrap.loops.data.loaders import batches_from
from stepwrap.loops.data.tensors import TensorLoader

IMAGES = torch.randn(60, 3, 4, 4)
IMAGES[0, 0, 0, 0] = float("nan")
LABELS = torch.randint(0, 9, (60,))
MASKS = torch.rand(60, 2) < 0.5


class Rows(Dataset[Any]):
    """Samples of any structure; `tensors` has rows of the same or of another structure."""

    def __init__(self, samples: Any, tensors: Any) -> None:
        self.samples = samples
        self.tensors = tensors

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        return self.samples(index)


def both(dataset: Dataset[Any], **options: Any) -> list[DataLoader[Any]]:
    """Return the loader that reads samples and the one that selects rows."""
    loaders = [build_loader(dataset, in_memory=kind, **options) for kind in (False, True)]
    assert [type(loader) for loader in loaders] == [DataLoader, TensorLoader]
    return loaders


def assert_same_batches(plain: Any, ours: Any) -> None:
    for batch, other in zip(plain, ours, strict=True):
        assert type(batch) is type(other)
        assert_close(other, batch, rtol=0, atol=0, equal_nan=True, check_stride=True)


@settings(max_examples=80, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    epoch=st.integers(0, 3),
    start=st.integers(0, 9),
)
def test_batches_equal_collated_samples(
    samples: int,
    batch_size: int,
    world: int,
    flags: tuple[bool, bool, bool],
    epoch: int,
    start: int,
) -> None:
    shuffle, train, drop_last = flags
    data = TensorDataset(IMAGES[:samples], LABELS[:samples], MASKS[:samples])
    for rank in range(world):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "train": train}
        options |= {"seed": 3, "shard": (rank, world)}
        options["drop_last"] = drop_last and samples >= batch_size * world
        plain, ours = both(data, **options)
        assert len(plain) == len(ours)
        assert_same_batches(batches_from(plain, epoch, start), batches_from(ours, epoch, start))


@settings(max_examples=80, deadline=None)
@given(
    samples=st.integers(1, 300),
    run=st.integers(1, 12),
    micro=st.integers(1, 4),
    less=st.integers(0, 3),
    world=st.integers(1, 4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    start=st.integers(0, 70),
)
def test_rows_are_the_indices_however_updates_are_cut(
    samples: int,
    run: int,
    micro: int,
    less: int,
    world: int,
    flags: tuple[bool, bool, bool],
    start: int,
) -> None:
    same_count, weighted, even = flags
    for rank in range(world):
        sampler = ShardedBatchSampler(
            samples, run, shuffle=True, rank=rank, world_size=world, even=even
        )
        size = max(run * (micro - 1) + 1, run * micro - less)
        sampler.cut(size, micro, same_batch_count=same_count and not weighted, weighted=weighted)
        sampler.set_position(2, start)
        rows = [row.tolist() for row in sampler.rows()]
        assert rows == [sampler.get_indices(2, index) for index in range(start, len(sampler))]
        assert rows == list(sampler)


@pytest.mark.parametrize(
    ("samples", "tensors"),
    [
        (IMAGES.__getitem__, IMAGES),
        (lambda at: (IMAGES[at], LABELS[at]), (IMAGES, LABELS)),
        (lambda at: [IMAGES[at], LABELS[at]], [IMAGES, LABELS]),
        (lambda at: {"x": IMAGES[at], "y": LABELS[at]}, {"x": IMAGES, "y": LABELS}),
    ],
)
def test_a_batch_has_the_structure_of_the_samples(samples: Any, tensors: Any) -> None:
    plain, ours = both(Rows(samples, tensors), batch_size=7, shuffle=True)
    assert_same_batches(plain, ours)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_batches_are_pinned_like_collated_samples() -> None:
    plain, ours = both(make_data(5), batch_size=2, pin_memory=True)
    assert_same_batches(plain, ours)
    pinned = [
        tensor.is_pinned() for loader in (plain, ours) for batch in loader for tensor in batch
    ]
    assert set(pinned) == {torch.cuda.is_available()}


@pytest.mark.gpu
def test_rows_are_kept_on_the_device() -> None:
    data = make_data(5)
    loader = build_loader(data, batch_size=2, shuffle=True, in_memory="cuda")
    plain = build_loader(data, batch_size=2, shuffle=True, in_memory=False)
    for batch, other in zip(loader, plain, strict=True):
        assert all(tensor.is_cuda for tensor in batch)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(batch, other, strict=True))


def test_batches_are_made_on_a_device() -> None:
    loader = build_loader(make_data(10), batch_size=4, in_memory="meta")
    shapes = [[(tensor.device.type, tuple(tensor.shape)) for tensor in batch] for batch in loader]
    assert shapes == [[("meta", (n, 4)), ("meta", (n,))] for n in (4, 4, 2)]


class Plain(TensorDataset):
    """A data set with `tensors`."""


class Doubled(TensorDataset):
    """A data set whose samples differ from its rows."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


@pytest.mark.parametrize(
    ("dataset", "options", "kind"),
    [
        (TensorDataset(IMAGES, LABELS), {}, TensorLoader),
        (Plain(IMAGES), {}, TensorLoader),
        (Plain(IMAGES), {"in_memory": False}, DataLoader),
        (Doubled(IMAGES), {}, DataLoader),
        (Rows(IMAGES.__getitem__, IMAGES), {}, DataLoader),
        (Subset(TensorDataset(IMAGES), range(9)), {}, DataLoader),
        (TensorDataset(IMAGES.transpose(2, 3)), {}, DataLoader),
        (TensorDataset(IMAGES), {"num_workers": 1}, DataLoader),
        (TensorDataset(IMAGES), {"collate": len}, DataLoader),
    ],
)
def test_rows_are_selected_automatically_if_batches_stay_equal(
    dataset: Dataset[Any], options: dict[str, Any], kind: type
) -> None:
    assert type(build_loader(dataset, batch_size=2, **options)) is kind


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Subset(Plain(IMAGES), [1]), {}, TypeError, "attribute `tensors`.*; Subset has none"),
        (
            Rows(len, (IMAGES, 3)),
            {},
            TypeError,
            r"Rows at .*\.py:\d+ has \[float32 \(60, 3, 4, 4\)",
        ),
        (Rows(len, ()), {}, TypeError, r"has \[\]"),
        (Rows(len, (IMAGES, LABELS[:9])), {}, ValueError, r"of the 60 samples .*\(9,\) on cpu"),
        (Rows(len, IMAGES.to("meta")[0, 0, 0, 0]), {}, ValueError, r"one row .*\(\) on meta"),
        (Doubled(LABELS), {}, ValueError, r"in Doubled at .*they differ.*in_memory=False"),
        (
            Rows(IMAGES.__getitem__, [IMAGES]),
            {},
            ValueError,
            r"rows are \[float32.*, samples are float32",
        ),
        (Rows(IMAGES.double().__getitem__, IMAGES), {}, ValueError, "float32.*float64"),
        (Plain(IMAGES), {"num_workers": 2}, ValueError, "needs num_workers=0 .*got 2 and None"),
        (Plain(IMAGES), {"collate": len}, ValueError, "collate=None, .*got 0 and len"),
        (Stream(), {}, ValueError, "in_memory must be false for Stream"),
    ],
)
def test_unsuitable_data_sets_and_options_are_refused(
    dataset: Dataset[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        build_loader(dataset, batch_size=2, in_memory=True, **options)


class Drawing(TensorDataset):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.own = random.Random(1)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.own.random()
        torch.rand(())
        return super().__getitem__(index)


def test_making_a_loader_and_reading_it_move_no_random_stream() -> None:
    dataset = Drawing(IMAGES)
    before = torch.get_rng_state(), random.getstate(), dataset.own.getstate()
    list(build_loader(dataset, batch_size=8, shuffle=True, in_memory=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), dataset.own.getstate()) == before[1:]


def train(in_memory: bool) -> dict[str, Tensor]:
    options: dict[str, Any] = {"batch_size": 2, "in_memory": in_memory}
    loader = build_loader(make_data(13), train=True, shuffle=True, **options)
    val_loop = ValLoop(build_loader(make_data(7), **options), {"loss": MeanLoss()})
    state = make_state(accumulate=2, dropout=0.5)
    EpochTrainLoop(loader, max_epochs=3, val_loop=val_loop).run(state, HookList())
    return get_weights(state) | {"loss": torch.tensor(state.metrics["loss"])}


def test_a_run_ends_with_the_same_weights() -> None:
    assert_identical(train(False), train(True))


@pytest.mark.parametrize("change", ["replace", "in place", "list"])
@pytest.mark.parametrize("device", [True, "cpu"])
def test_a_pass_reads_the_tensors_that_the_data_set_has_now(change: str, device: Any) -> None:
    data = TensorDataset(torch.arange(6.0), torch.zeros(6))
    loader = build_loader(data, batch_size=3, in_memory=device)
    assert isinstance(loader, TensorLoader)
    assert torch.cat([batch[0] for batch in loader]).tolist() == [0, 1, 2, 3, 4, 5]
    if change == "replace":
        data.tensors = (torch.arange(6.0) * 2, torch.zeros(6))
    elif change == "in place":
        data.tensors[0].mul_(2)
    else:
        data.tensors = (data.tensors[0] * 2, torch.ones(6), torch.ones(6))
    batches = list(loader)
    assert torch.cat([batch[0] for batch in batches]).tolist() == [0, 2, 4, 6, 8, 10]
    assert len(batches[0]) == len(data.tensors)
    data.tensors = (torch.zeros(4),)
    with pytest.raises(ValueError, match="6 samples"):
        iter(loader)
