"""Mistakes of one rank alone, and how they raise on the others."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import outcome
from ranks import on_ranks, run_ranks

from stepwrap.collectives import (
    BaseMetric,
    all_gather,
    all_reduce,
    all_reduce_dict,
    gather,
    mean_scalars,
    metric_sync,
    reduce_mean,
    trace_collectives,
)
from stepwrap.collectives import dist as in_place


class Broken(Mapping[str, float]):
    def __getitem__(self, key: str) -> float:
        raise LookupError(key)

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


class Unnamed:
    """A key whose `repr` fails."""

    def __repr__(self) -> str:
        raise OSError("no text")


class Items(BaseMetric):
    def add(self, value: int) -> None:
        self._results.append(value)

    def compute_metric(self, results: list[Any]) -> Any:
        return results


def _compute(size: int) -> Any:
    metric = Items()
    metric.add(dist.get_rank())
    return metric.compute(size)


def _sync(group: object) -> Any:
    return metric_sync()["dist_sync_fn"](torch.ones(1), group)


ONE = torch.ones(2, 2)
SPARSE = torch.eye(2).to_sparse()
META = torch.ones(2, 2, device="meta")
NAN = float("nan")
# The call, the arguments of rank 0 and of rank 1, and the error on both.
AGREED: list[tuple[Callable[..., object], tuple[Any, ...], tuple[Any, ...], str, str]] = [
    (all_gather, (ONE,), ([1.0],), "TypeError", "data must be a torch.Tensor, got list"),
    (all_gather, (ONE,), (None,), "TypeError", "data must be a torch.Tensor, got NoneType"),
    (all_gather, (ONE,), (SPARSE,), "ValueError", "must be a dense (torch.strided) tensor, got to"),
    (all_gather, (ONE,), (META,), "ValueError", "must have values, got a tensor on the meta dev"),
    (gather, (ONE,), (META,), "ValueError", "must have values, got a tensor on the meta device"),
    (gather, (ONE, 0), (ONE, 2), "ValueError", "dst must be a rank of the group [0, 1], got 2"),
    (all_reduce_dict, ({"a": 1},), (None,), "TypeError", "py_dict must be a mapping, got NoneType"),
    (all_reduce_dict, ({"a": 1},), ({"a": 1}, "avg"), "ValueError", "reduce_op must be one of sum"),
    (
        all_reduce_dict,
        ({"a": ONE},),
        ({"a": SPARSE},),
        "ValueError",
        "py_dict['a'] must be a dense",
    ),
    (all_reduce_dict, ({"a": ONE},), ({"a": META},), "ValueError", "py_dict['a'] must have values"),
    (all_reduce_dict, ({"a": 1},), (Broken(),), "LookupError", "a"),
    (all_reduce_dict, ({"a": 1},), ({Unnamed(): 1},), "OSError", "no text"),
    (all_reduce_dict, ({NAN: 1},), ({NAN: 1, -NAN: 2},), "ValueError", "equal to themselves, got"),
    (in_place.all_reduce_dict, ({},), ({}, "avg"), "ValueError", "op must be one of sum, product"),
    (in_place.all_reduce_dict, ({"a": ONE},), ({"a": META},), "ValueError", "data['a'] must have"),
    (in_place.all_reduce_params, ([ONE],), ([SPARSE],), "ValueError", "params[0] must be a dense"),
    (in_place.all_reduce_params, ([],), ([], True, 0), "ValueError", "bucket_size_mb must be posi"),
    (in_place.broadcast_object_list, ([1],), ([1], 5), "ValueError", "src must be a rank of the "),
    (mean_scalars, ({"a": 1},), (None,), "TypeError", "scalars must be a mapping, got NoneType"),
    (
        mean_scalars,
        ({"a": 1},),
        ({"a": META[0, 0]},),
        "ValueError",
        "scalars['a'] must have values",
    ),
    (mean_scalars, ({"a": 1},), (Broken(),), "LookupError", "a"),
    (_compute, (1,), (-1,), "ValueError", "size must not be negative, got -1"),
    (_sync, (None,), ("other",), "ValueError", "process_group must be None with metric_sync()"),
]


def _make_agreed_mistakes(is_tracing: bool) -> list[tuple[str, str]]:
    rank = dist.get_rank()
    trace_collectives(is_tracing)
    try:
        outcomes = [outcome(call, *(mine, theirs)[rank]) for call, mine, theirs, _, _ in AGREED]
        # No rank is left waiting.
        assert torch.stack(all_gather(torch.tensor(rank))).tolist() == [0, 1]
    finally:
        trace_collectives(False)
    return outcomes


@pytest.mark.parametrize("is_tracing", [False, True])
def test_the_mistake_of_one_rank_is_an_error_on_all(is_tracing: bool) -> None:
    for outcomes in run_ranks(_make_agreed_mistakes, 2, is_tracing):
        for (name, message), (call, _, _, error, text) in zip(outcomes, AGREED, strict=True):
            assert name == error, (call, message)
            assert text in message
            assert "on rank 1 (tests" in message or "on rank 0 (tests" in message


RAW: list[tuple[Callable[..., object], tuple[Any, ...], tuple[Any, ...], str, str]] = [
    (all_reduce, (ONE,), (1.0,), "TypeError", "data must be a torch.Tensor, got float"),
    (all_reduce, (ONE,), (SPARSE,), "ValueError", "data must be a dense (torch.strided) tensor"),
    (all_reduce, (ONE,), (ONE, "maen"), "ValueError", "op must be one of sum, product, "),
    (in_place.broadcast, (ONE,), (META,), "ValueError", "data must have values, got"),
    (in_place.broadcast, (ONE,), (ONE, 2), "ValueError", "src must be a rank of the group [0, 1]"),
    (reduce_mean, (ONE,), (1.0,), "TypeError", "tensor must be a torch.Tensor, got float"),
]


def _make_traced_mistakes() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    trace_collectives()
    try:
        outcomes = [outcome(call, *(mine, theirs)[rank]) for call, mine, theirs, _, _ in RAW]
        # The same mistake on all ranks: each raises its own error.
        outcomes.append(outcome(all_reduce, 1.0))
        assert torch.stack(all_gather(torch.tensor(rank))).tolist() == [0, 1]
    finally:
        trace_collectives(False)
    return outcomes


def test_calls_without_a_first_message_agree_while_tracing() -> None:
    for outcomes in run_ranks(_make_traced_mistakes, 2):
        for (name, message), (_, _, _, error, text) in zip(outcomes[:-1], RAW, strict=True):
            assert name == "CollectiveError"
            assert f"which raised {error}: " in message
            assert text in message
            assert "rank 1: " in message
        assert outcomes[-1][0] == "TypeError"
        assert re.search(r"data must .*torch\.Tensor, got float$", outcomes[-1][1])


def _make_a_raw_mistake(ended: Path) -> tuple[str, str]:
    if dist.get_rank() == 0:
        answer = outcome(all_reduce, ONE.clone())
        ended.touch()
        return answer
    refused = outcome(all_reduce, 1.0)
    # Stay alive until the other rank has timed out.
    while not ended.exists():
        time.sleep(0.01)
    return refused


@pytest.mark.slow
def test_calls_without_a_first_message_end_at_the_timeout(tmp_path: Path) -> None:
    rank_0, second = run_ranks(_make_a_raw_mistake, 2, tmp_path / "ended", group_timeout_s=1)
    assert rank_0[0] == "CollectiveError"
    assert "rank 1 has not arrived" in rank_0[1]
    assert second[0] == "TypeError"
    assert re.search(r"data must .*torch\.Tensor, got float$", second[1])


@on_ranks(2)
def test_scalars_that_meet_another_call() -> None:
    calls = [lambda: mean_scalars({"a": 1.0}), lambda: all_reduce_dict({"a": 1.0})]
    outcomes = [outcome(call) for call in (calls if dist.get_rank() == 0 else calls[::-1])]
    for name, message in outcomes:
        assert name == "CollectiveError"
        assert "in mean_scalars (" in message
        assert "in all_reduce_dict (" in message


@pytest.mark.parametrize("wrong", [SPARSE, META])
def test_one_process_refuses_the_same(wrong: torch.Tensor) -> None:
    for call in (all_gather, gather, all_reduce, reduce_mean, in_place.broadcast):
        name, message = outcome(call, wrong)
        assert (name, " must " in message) == ("ValueError", True)
    for call in (all_reduce_dict, in_place.all_reduce_dict):
        assert outcome(call, {"a": wrong})[0] == "ValueError"
