"""Runs over stateful loaders and data sets resume exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_parts import assert_identical, get_weights, make_data, make_state
from marks import nightly, slow
from ranks import run_ranks
from stream_parts import ROWS, SAMPLES, Lines, OwnLoader, SaveAll, resume_from
from torch.utils.data import DataLoader, IterableDataset
from warm import ended

from stepwrap.loops import (
    CheckpointError,
    EpochTrainLoop,
    HookList,
    LoopState,
    build_loader,
    load_checkpoint,
)
from stepwrap.loops.data.resume import make_resumable
from stepwrap.wrappers import StepDistributedDataParallel

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # Raised by StatefulDataLoader 0.11 with torch 2.13.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

KINDS = [("own stream", 0), ("own loader", 0), ("iterator", 0)]
MORE = [
    ("own stream", 2),
    ("torchdata", 0),
    ("datasets", 0),
    ("workers of a pass", 2),
    ("own stream", 3),
    ("drop_last", 2),
    ("torchdata", 2),
    ("datasets", 2),
    ("datasets in torchdata", 0),
]


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "torchdata"):
        if package in request.node.name:
            pytest.importorskip(package)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(("kind", "workers"), [*KINDS, *slow(*MORE)])
def test_a_run_resumes_from_any_save_point(tmp_path: Path, kind: str, workers: int) -> None:
    """Batches, their noise and the final weights are the same."""
    indices = resume_from(tmp_path, kind, workers)
    if kind not in ("own loader", "iterator", "drop_last"):
        assert set(Counter(indices).values()) == {3}
        assert len(set(indices)) == (ROWS if kind.startswith("datasets") else SAMPLES)


@pytest.mark.parametrize(
    ("kind", "workers"), [("own stream", 2), *slow(("torchdata", 0)), *nightly(("datasets", 2))]
)
def test_each_rank_resumes_from_its_own_place(tmp_path: Path, kind: str, workers: int) -> None:
    run_ranks(resume_from, 2, tmp_path, kind, workers)


def _state(uneven: bool = False) -> LoopState:
    state = make_state()
    if uneven:
        state.model = StepDistributedDataParallel(state.model.module, uneven_inputs=True)
    return state


class Claimed(Lines):
    """A stream with a wrong length, such as the total length of its shards."""

    def __len__(self) -> int:
        return 100


def _train_apart(folder: Path, kind: type[Lines], uneven: bool) -> tuple[str, int, bool]:
    """Train on streams of 3 and 5 batches; return error, step and whether a resume was exact."""
    counts = (6, 10)
    loader = build_loader(kind(counts[dist.get_rank()], of=(0, 1)), batch_size=2)
    state, hook = _state(uneven), SaveAll(folder)
    try:
        EpochTrainLoop(loader, max_epochs=2).run(state, HookList([hook]))
    except ValueError as error:
        return str(error), state.step, False
    resumed = _state(uneven)
    load_checkpoint(hook.saved[1][1]).restore(resumed)
    loader = build_loader(kind(counts[dist.get_rank()], of=(0, 1)), batch_size=2)
    EpochTrainLoop(loader, max_epochs=2).run(resumed, HookList())
    assert_identical(get_weights(resumed), get_weights(state))
    return "", state.step, True


@pytest.mark.parametrize("kind", [Lines, Claimed])
def test_streams_that_end_apart(tmp_path: Path, kind: type[Lines]) -> None:
    """With any claimed length all ranks stop within a batch, or continue with uneven inputs."""
    for text, steps, _ in run_ranks(_train_apart, 2, tmp_path / "even", kind, False):
        assert re.search("rank 0 ran out .*3 batches .*epoch 1", text)
        assert "rank 1 did not" in text
        assert steps == 3
    assert run_ranks(_train_apart, 2, tmp_path / "uneven", kind, True) == [("", 10, True)] * 2


def _save(folder: Path, loader: Any, steps: int = 3) -> Path:
    """Train on a loader and return the checkpoint after `steps` updates."""
    hook = SaveAll(folder)
    EpochTrainLoop(loader, max_epochs=1).run(make_state(), HookList([hook]))
    return hook.saved[steps - 1][1]


def _resume(path: Path, loader: Any) -> LoopState:
    state = make_state()
    load_checkpoint(path).restore(state)
    return EpochTrainLoop(loader, max_epochs=1).run(state, HookList())


@pytest.mark.slow
def test_spawned_workers_resume_within_their_round(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 2,
        "multiprocessing_context": "spawn",
    }
    state, hook = make_state(), SaveAll(tmp_path)
    EpochTrainLoop(build_loader(Lines(), **options), max_epochs=1).run(state, HookList([hook]))
    # The third batch comes from the first worker.
    resumed = _resume(hook.saved[2][1], build_loader(Lines(), **options))
    assert_identical(get_weights(resumed), get_weights(state))


def test_other_workers_inside_a_pass_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, build_loader(Lines(), batch_size=3, num_workers=2))
    with pytest.raises(ValueError, match="num_workers must .*2 .*this pass.* got 1"):
        _resume(path, build_loader(Lines(), batch_size=3, num_workers=1))


def test_a_place_of_another_loader_is_refused_or_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _save(tmp_path, OwnLoader())
    with pytest.raises(ValueError, match="StreamLoader cannot continue"):
        _resume(path, build_loader(Lines(), batch_size=3))
    batches = [[torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)]] * 5
    assert _resume(path, batches).iteration == 5
    assert "list cannot restore its position" in caplog.text


class Unsafe(Lines):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reader": {"file": object()}}


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"got a builtins.object in .*loader.workers.0.samples.reader.file"
    ):
        _save(tmp_path, build_loader(Unsafe(), batch_size=3))


class Plain(IterableDataset[Any]):
    """A stream without a state and with a fixed order."""

    def __init__(self) -> None:
        self.data = make_data(SAMPLES)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_state_is_read_up_to_the_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    state, hook = make_state(dropout=0.5), SaveAll(tmp_path)
    loader = build_loader(Plain(), batch_size=3, num_workers=workers)
    EpochTrainLoop(loader, max_epochs=1).run(state, HookList([hook]))
    assert not caplog.records
    resumed = make_state(dropout=0.5)
    load_checkpoint(hook.saved[3][1]).restore(resumed)
    caplog.set_level("INFO")
    EpochTrainLoop(loader, max_epochs=1).run(resumed, HookList())
    assert_identical(get_weights(resumed), get_weights(state))
    warning, took = (record.getMessage() for record in caplog.records)
    assert "by reading and discarding 4 batches" in warning
    assert re.search(r"data set with state_dict\(\) .*load_state_dict\(\)", warning)
    assert "reading and discarding 4 batches took" in took


def _save_by_ranks(folder: Path) -> Path:
    return _save(folder, build_loader(Lines(), batch_size=3))


def test_another_number_of_ranks_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_ranks(_save_by_ranks, 2, tmp_path)[0]
    _resume(path, build_loader(Lines(), batch_size=3))
    assert re.search("cannot .*from 2 to 1 ranks", caplog.text)
    assert "by reading and discarding 6 batches" in caplog.text


@pytest.mark.slow
def test_a_killed_run_with_workers_resumes_exactly(tmp_path: Path) -> None:
    program = "import sys; from stream_parts import train_program; train_program(*sys.argv[1:])"
    folder = Path(__file__).parent

    def train(run: str, kill_at: int) -> int:
        words = (tmp_path / run, kill_at, tmp_path / f"{run}.pt")
        return ended("-c", program, *words, cwd=folder).returncode

    assert train("whole", -1) == 0
    assert train("killed", 11) == -9
    assert train("killed", -1) == 0
    uninterrupted, killed = (torch.load(tmp_path / f"{run}.pt") for run in ("whole", "killed"))
    assert_identical(uninterrupted, killed)


class Interleaved(IterableDataset[int]):
    """Fail like an interleaved stream of `datasets` in a worker with fewer shards."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        yield [0, 1, 2, 3][self.place]
        yield 1

    def state_dict(self) -> dict[str, int]:
        return {"place": 4}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_state_of_other_shards_names_the_setting_to_resume_with() -> None:
    loader = make_resumable(DataLoader(Interleaved(), batch_size=1))
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"shuffle\(buffer_size=1, max_buffer_input_shards=1\)"):
        next(iter(loader))
