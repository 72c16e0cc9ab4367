"""Prefetching changes no batch, and batches that were not trained on do not count."""

from __future__ import annotations

import gc
import multiprocessing
import re
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_parts import assert_identical, get_weights, make_data, make_state
from marks import slow
from stream_parts import Noisy, SaveAll, resume_from
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from stepwrap.loops import (
    EpochTrainLoop,
    Hook,
    HookList,
    IterTrainLoop,
    LoopState,
    build_loader,
    load_checkpoint,
    prefetch_to_device,
)


def numbers(events: list[str], bad: int = 9) -> Iterator[int]:
    for number in range(1, 4):
        events.append(f"read {number}")
        if number == bad:
            raise OSError(f"cannot read {number}")
        yield number


@pytest.mark.parametrize(
    ("ahead", "order"), [(True, "read 1, read 2, 1, read 3, 2, 3"), (False, "read 1, 1, read 2")]
)
def test_each_batch_is_read_before_its_predecessor_is_yielded(ahead: bool, order: str) -> None:
    events: list[str] = []
    for number in prefetch_to_device(numbers(events), "cpu", ahead=ahead):
        events.append(str(number))
    assert ", ".join(events).startswith(order)
    assert len(events) == 6
    assert list(prefetch_to_device([], "cpu", ahead=ahead)) == []


def test_an_error_is_raised_in_order() -> None:
    batches = prefetch_to_device(numbers([], bad=3), "cpu")
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(OSError, match="cannot read 3"):
        next(batches)


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("sample 5 is broken")
        return super().__getitem__(index)


def test_an_error_of_a_worker_names_its_batch() -> None:
    loader = build_loader(Broken(), batch_size=2, train=True, num_workers=1)
    state = make_state()
    with pytest.raises(ValueError, match="sample 5 is broken") as caught:
        EpochTrainLoop(loader, max_epochs=1, prefetch_to_device=True).run(state, HookList())
    assert state.step == 2
    assert any(
        re.search("reading batch 3 .*epoch 1 .*Broken at ", note)
        for note in caught.value.__notes__  # type: ignore[attr-defined]
    )


def test_the_workers_of_a_failed_pass_end_with_their_iterator() -> None:
    """Iterator and queues are freed as parts of a cycle, which the traceback closes."""

    def fail() -> None:
        loader = build_loader(Broken(), batch_size=2, train=True, num_workers=2)
        with pytest.raises(ValueError, match="sample 5 is broken"):
            EpochTrainLoop(loader, max_epochs=1).run(make_state(), HookList())

    before = set(multiprocessing.active_children())
    fail()
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


def test_a_loader_in_memory_is_read_one_batch_ahead() -> None:
    events: list[str] = []

    class Rows(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__ == "index_select":
                events.append("read")
            return super().__torch_function__(func, types, args, kwargs)

    class Steps(Hook):
        def on_batch_start(self, state: LoopState, batch: Any) -> None:
            events.append("step")

    inputs, targets = make_data(6).tensors
    dataset = TensorDataset(inputs.as_subclass(Rows), targets)
    loader = build_loader(dataset, batch_size=2, in_memory=True)
    # Drop the events of the comparison of the first and last row with the samples.
    events.clear()
    for prefetch, order in ((True, "read read step read step step"), (False, "read step " * 3)):
        loop = EpochTrainLoop(loader, max_epochs=1, prefetch_to_device=prefetch)
        loop.run(make_state(), HookList([Steps()]))
        assert " ".join(events) == order.strip()
        events.clear()


def make_loader(kind: str) -> Any:
    """Return a loader whose batches are read ahead, except for "noise"."""
    if kind == "list":
        return list(build_loader(make_data(13), batch_size=3))
    dataset: Dataset[Any] = make_data(13) if kind == "in memory" else Noisy()
    workers = 2 if kind == "noise of workers" else 0
    return build_loader(dataset, batch_size=3, train=True, shuffle=True, num_workers=workers)


def train(kind: str, prefetch: bool, folder: Path | None = None) -> tuple[LoopState, SaveAll]:
    state, hook = make_state(accumulate=2, dropout=0.5), SaveAll(folder)
    loop = EpochTrainLoop(make_loader(kind), max_epochs=2, prefetch_to_device=prefetch)
    loop.run(state, HookList([hook]))
    return state, hook


@pytest.mark.parametrize("kind", ["in memory", *slow("list", "noise", "noise of workers")])
def test_a_run_and_its_resumed_runs_end_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    plain, _ = train(kind, prefetch=False)
    state, hook = train(kind, prefetch=True, folder=tmp_path)
    assert_identical(get_weights(state), get_weights(plain))
    for done, path in hook.saved[::2]:
        resumed = make_state(accumulate=2, dropout=0.5)
        load_checkpoint(path).restore(resumed)
        assert resumed.iteration == done
        # Resume a prefetching run without prefetching, and the reverse.
        loop = EpochTrainLoop(make_loader(kind), max_epochs=2, prefetch_to_device=done % 4 == 0)
        loop.run(resumed, HookList())
        assert_identical(get_weights(resumed), get_weights(plain))
        assert resumed.state_dict() == {**plain.state_dict(), "clock_s": resumed.clock_s}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *(("own loader", 0), ("iterator", 0), ("torchdata", 0)),
        *slow(("own stream", 0), ("own stream", 2), ("torchdata", 2)),
    ],
)
def test_stateful_loaders_resume_from_their_place(kind: str, workers: int, tmp_path: Path) -> None:
    resume_from(tmp_path, kind, workers, prefetch_to_device=True)


def test_a_run_by_steps_resumes_inside_its_pass() -> None:
    weights = []
    for steps in ([9], [2, 3, 7, 9]):
        state, loader = make_state(dropout=0.5), make_loader("in memory")
        for step in steps:
            IterTrainLoop(loader, max_steps=step, prefetch_to_device=True).run(state, HookList())
        weights.append(get_weights(state))
    assert_identical(*weights)


Pair = namedtuple("Pair", "image label")


class Boxes:
    def to(self, device: torch.device) -> Any:
        raise AssertionError("moved on a stream that the model does not use")


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_arrive_on_the_device(ahead: bool, pinned: bool) -> None:
    def make(number: int) -> list[Any]:
        image = torch.full((512, 512), float(number))
        image = image.pin_memory() if pinned else image
        boxes = Boxes()
        return [Pair(image, torch.tensor(number)), {"x": (image, "text"), "boxes": boxes}, number]

    for number, batch in enumerate(prefetch_to_device(map(make, range(50)), "cuda", ahead=ahead)):
        pair, named, scalar = batch
        assert type(pair) is Pair
        assert (scalar, named["x"][1], type(named["boxes"])) == (number, "text", Boxes)
        for tensor in (pair.image, pair.label, named["x"][0]):
            assert tensor.is_cuda
            # Steps take longer than copies, so that memory that is reused too early is noticed.
            for _ in range(5):
                torch.mm(pair.image, pair.image)
            assert (tensor == number).all()


@pytest.mark.gpu
@pytest.mark.parametrize("in_memory", [True, False, "cuda"])
def test_a_run_on_the_device_ends_with_the_same_weights(in_memory: bool | str) -> None:
    def train(prefetch: bool) -> dict[str, Tensor]:
        data = TensorDataset(*make_data(40).tensors)
        loader = build_loader(data, batch_size=3, train=True, shuffle=True, in_memory=in_memory)
        state = make_state()
        state.model.cuda()
        EpochTrainLoop(loader, max_epochs=3, prefetch_to_device=prefetch).run(state, HookList())
        return get_weights(state)

    assert_identical(train(True), train(False))
