"""A mistake of one rank raises an error on all ranks that names it."""

import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import HERE, outcome_text, traced
from ranks import on_ranks, run_ranks

from stepwrap.collectives import (
    all_gather_object,
    all_reduce_dict,
    broadcast,
    gather_object,
    mean_scalars,
    pad_to_largest_tensor,
    synchronize,
)
from stepwrap.collectives.trace.calling import calling


class _Pair:
    """Call a collective of a pair of ranks while being pickled."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (all_gather_object(dist.get_rank(), self.pair),)


def _gather_inside() -> list[Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return all_gather_object(_Pair(pairs[dist.get_rank() // 2]))


@pytest.mark.parametrize("on", [True, False])
def test_a_collective_inside_another_keeps_its_own_group(on: bool) -> None:
    expected = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_ranks(traced, 4, on, _gather_inside) == [expected] * 4


@on_ranks(2)
def test_roots_that_differ_are_an_error_at_once() -> None:
    rank = dist.get_rank()
    texts = [
        outcome_text(broadcast, rank, rank),
        outcome_text(broadcast, torch.ones(100_000), rank),
        outcome_text(gather_object, torch.ones(500_000), rank),
    ]
    roots = ("broadcast from", "broadcast from", "gather_object to")
    for text, call in zip(texts, roots, strict=True):
        assert re.sub(rf"{HERE}:\d+", "HERE", text).endswith(
            f"but rank 0 is in {call} rank 0 (HERE), rank 1 waits in {call} rank 1 (HERE)"
        )


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class _FailsToPickle:
    def __reduce__(self) -> tuple[Any, ...]:
        raise _Unspeakable


def _fail_in_an_odd_place() -> list[str]:
    rank = dist.get_rank()
    folder = os.getcwd()
    if rank == 1:
        gone = tempfile.mkdtemp()
        os.chdir(gone)
        os.rmdir(gone)
    try:
        return [
            outcome_text(all_gather_object, threading.Lock() if rank == 1 else 1),
            outcome_text(all_gather_object, _FailsToPickle() if rank == 1 else 1),
        ]
    finally:
        os.chdir(folder)


def test_errors_without_a_text_or_a_directory_reach_all_ranks() -> None:
    for texts in run_ranks(_fail_in_an_odd_place, 2, group_timeout_s=20):
        assert re.search("rank 1 cannot pickle .*: TypeError: ", texts[0])
        assert re.search("rank 1 cannot pickle .*: _Unspeakable .*without", texts[1])


def _give_bad_data() -> list[str]:
    bad = dist.get_rank() == 1
    return [
        outcome_text(mean_scalars, None if bad else {"a": 1}),
        outcome_text(all_reduce_dict, {"a": "text"} if bad else {"a": 1}),
        outcome_text(pad_to_largest_tensor, torch.ones(2, 2) if bad else torch.ones(2)),
        outcome_text(all_gather_object, threading.Lock() if bad else 1),
    ]


@pytest.mark.parametrize("on", [True, False])
def test_bad_data_on_one_rank_raises_on_all(on: bool) -> None:
    for texts in run_ranks(traced, 2, on, _give_bad_data, group_timeout_s=20):
        kinds = [text.split(":")[0] for text in texts]
        assert kinds == ["TypeError", "TypeError", "ValueError", "CollectiveError"]


def _fail_inside() -> None:
    with calling("made_up"):
        raise RuntimeError("the transport has no such operation")


def test_a_rank_without_memory_reports_no_transport() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"), calling("made_up"):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def _fail_then_leave(folder: str) -> list[str]:
    """Let both ranks fail in one call; later rank 0 waits alone for rank 1, which computes."""
    texts = [outcome_text(_fail_inside)]
    dist.barrier()
    time.sleep(1.2)
    if dist.get_rank() == 1:
        while not os.listdir(folder):
            time.sleep(0.01)
        return texts
    texts.append(outcome_text(synchronize, 1.5))
    Path(folder, "done").touch()
    return texts


def test_an_old_failure_is_not_taken_for_a_wait(tmp_path: Path) -> None:
    error_text, second = run_ranks(_fail_then_leave, 2, str(tmp_path))[0]
    assert re.search(r"made_up\(\) failed .*ranks 0, 1 .*made_up", error_text)
    assert re.search(r"rank 0 .*synchronize.*rank 1 gave up.*made_up.*\d s", second)
