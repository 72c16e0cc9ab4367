"""Collectives over NCCL: values on two and four ranks, and ranks that do not come."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_calls import call_every_helper
from gpu_ranks import fail_on_gpus, run_on_gpus, stay_away
from torch import Tensor

from stepwrap.collectives import (
    CollectiveGroup,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_dict,
    broadcast,
    get_rank,
    get_world_size,
    mean_scalars,
    synchronize,
    trace_collectives,
)
from stepwrap.collectives.tensors.tensors import broadcast as broadcast_in_place

# How the values of the ranks, stacked in the first dimension, are reduced.
_BITS = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "product": lambda stacked: stacked.prod(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "mean": lambda stacked: stacked.double().mean(0).round(),
    **{
        name: functools.partial(lambda bits, stacked: functools.reduce(bits, stacked), bits)
        for name, bits in _BITS.items()
    },
}
# NCCL itself has no bitwise operations, no complex numbers and no booleans.
CASES = [
    *[("sum", dtype) for dtype in (torch.float64, torch.float16, torch.int64, torch.complex64)],
    *[("product", dtype) for dtype in (torch.float32, torch.int32, torch.complex128)],
    *[("min", torch.bfloat16), ("max", torch.uint8), ("max", torch.bool), ("sum", torch.bool)],
    *[("mean", torch.int64), ("band", torch.int64), ("bor", torch.uint8), ("bxor", torch.int32)],
]


def _values(rank: int, dtype: torch.dtype) -> Tensor:
    values = (torch.arange(6) * 3 + rank * 5) % 7
    return (values * (1 + 1j)).to(dtype) if dtype.is_complex else values.to(dtype)


def _reduce(op: str, dtype: torch.dtype, size: int) -> list[Any]:
    stacked = torch.stack([_values(rank, dtype) for rank in range(size)])
    if dtype is torch.bool:
        return list(stacked.any(0).tolist())
    return list(REDUCTIONS[op](stacked).to(dtype).tolist())


def _reduce_over_ranks() -> list[list[Any]]:
    results = []
    for op, dtype in CASES:
        tensor = _values(get_rank(), dtype).cuda()
        all_reduce(tensor, op)
        assert tensor.is_cuda
        results.append(tensor.tolist())
    return results


def _call_others() -> dict[str, Any]:
    """Return tensors of the last rank and of all ranks, for each dtype, and large ones."""
    rank, last_rank = get_rank(), get_world_size() - 1
    received, gathered = [], []
    for dtype in dict.fromkeys(dtype for _, dtype in CASES):
        tensor = _values(rank, dtype).cuda()
        gathered.append([rank_tensor.tolist() for rank_tensor in all_gather(tensor)])
        broadcast_in_place(tensor, src=last_rank)
        received.append(tensor.tolist())
    large = torch.full((300_000,), float(rank), device="cuda")
    sums = all_reduce_dict({"large": large, "small": large[:2].long()}, "sum")
    return {
        "received": received,
        "gathered": gathered,
        "large": [set(rank_large.tolist()) for rank_large in all_gather(large)],
        "sums": (set(sums["large"].tolist()), sums["small"].tolist(), sums["large"].is_cuda),
    }


def _check_every_helper(answers: dict[str, Any], rank: int, size: int, device: int) -> None:
    total = size * (size + 1) / 2
    mean = total / size
    assert answers["sum"] == ([total] * 3, f"cuda:{device}")
    assert answers["mean"] == ([mean] * 3, True)
    assert answers["dict"] == {
        "a": ([total] * 3, "cuda"),
        "b": ([int(total)] * 3, "cuda"),
        "c": ([total] * 3, "cpu"),
    }
    assert answers["scalars"] == {"a": mean, "b": mean, "c": 1.0}
    assert answers["gathered"] == [([(other + 1) * 1j] * 3, True) for other in range(size)]
    assert answers["on_0"] == ([[True] * 3] * size if rank == 0 else [])
    assert answers["padded"] == ([min(other + 1, 3) for other in range(size)], True)


def _check_values(size: int) -> None:
    reduced = [_reduce(op, dtype, size) for op, dtype in CASES]
    assert run_on_gpus(_reduce_over_ranks, size) == [reduced] * size
    dtypes = list(dict.fromkeys(dtype for _, dtype in CASES))
    expected = {
        "received": [_values(size - 1, dtype).tolist() for dtype in dtypes],
        "gathered": [[_values(rank, dtype).tolist() for rank in range(size)] for dtype in dtypes],
        "large": [{float(rank)} for rank in range(size)],
        "sums": ({size * (size - 1) / 2}, [size * (size - 1) // 2] * 2, True),
    }
    assert run_on_gpus(_call_others, size) == [expected] * size


@pytest.mark.gpu2
def test_tensors_of_two_ranks() -> None:
    _check_values(2)


@pytest.mark.gpu4
def test_tensors_of_four_ranks() -> None:
    _check_values(4)


@pytest.mark.gpu2
def test_every_helper_on_two_ranks() -> None:
    for rank, answers in enumerate(run_on_gpus(call_every_helper, 2)):
        _check_every_helper(answers, rank, 2, rank)


@pytest.mark.gpu4
def test_every_helper_on_four_ranks() -> None:
    for rank, answers in enumerate(run_on_gpus(call_every_helper, 4)):
        _check_every_helper(answers, rank, 4, rank)


def _call_in_pairs() -> dict[str, Any]:
    """Call helpers in the groups of the even and of the odd ranks; return the results."""
    rank = get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    assert isinstance(group, dist.ProcessGroup)
    tensor = torch.full((2,), float(rank), device="cuda")
    reduced = tensor.clone()
    all_reduce(reduced, "sum", group)
    received = tensor.clone()
    broadcast_in_place(received, src=2 + rank % 2, group=group)
    synchronize(group=group)
    return {
        "sum": reduced.tolist(),
        "received": received.tolist(),
        "gathered": [rank_tensor.tolist() for rank_tensor in all_gather(tensor, group)],
        "objects": all_gather_object({"rank": rank}, group),
        "object": broadcast(rank, src=rank % 2, group=group),
        "dict": all_reduce_dict({"a": tensor}, "sum", group=group)["a"].tolist(),
        "scalars": mean_scalars({"a": tensor[0]}, group=group),
    }


@pytest.mark.gpu4
def test_two_groups_of_two_ranks() -> None:
    for rank, results in enumerate(run_on_gpus(_call_in_pairs, 4)):
        low, high = rank % 2, rank % 2 + 2
        assert results == {
            "sum": [float(low + high)] * 2,
            "received": [float(high)] * 2,
            "gathered": [[float(low)] * 2, [float(high)] * 2],
            "objects": [{"rank": low}, {"rank": high}],
            "object": low,
            "dict": [float(low + high)] * 2,
            "scalars": {"a": (low + high) / 2},
        }


def _call_a_group(ranks: list[int]) -> dict[str, Any] | None:
    """Call the methods of a `CollectiveGroup`; return the results, None outside of the group."""
    group = CollectiveGroup.create(ranks)
    if group.size() == -1:
        return None
    rank, (first_rank, *_, last_rank) = get_rank(), ranks
    tensor = torch.full((2,), float(rank), device="cuda")
    reduced = tensor.clone()
    group.all_reduce(reduced)
    received = tensor.clone()
    if rank == first_rank:
        group.send(tensor, last_rank)
    elif rank == last_rank:
        group.recv(received, first_rank)
    group.barrier()
    results = {
        "sum": reduced.tolist(),
        "received": received.tolist(),
        "objects": group.all_gather_object(rank),
        "object": group.broadcast_object(rank, last_rank),
    }
    group.destroy()
    return results


def _expect_of_group(rank: int, ranks: list[int]) -> dict[str, Any] | None:
    if rank not in ranks:
        return None
    return {
        "sum": [float(sum(ranks))] * 2,
        "received": [float(ranks[0] if rank == ranks[-1] else rank)] * 2,
        "objects": ranks,
        "object": ranks[-1],
    }


@pytest.mark.parametrize(
    ("size", "ranks"),
    [
        pytest.param(2, [0, 1], marks=pytest.mark.gpu2),
        pytest.param(4, [0, 2, 3], marks=pytest.mark.gpu4),
    ],
)
def test_the_calls_of_a_group(size: int, ranks: list[int]) -> None:
    expected = [_expect_of_group(rank, ranks) for rank in range(size)]
    assert run_on_gpus(_call_a_group, size, ranks) == expected


def _call_without_a_rank(call: str, how: str) -> None:
    """Reduce a tensor over NCCL, and call once more without rank 1."""
    tensor = torch.ones(2, device="cuda")
    all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 2
    trace_collectives(call == "traced")
    if get_rank() == 1:
        stay_away(how)
    if call == "object":
        all_gather_object(tensor)
    elif call == "barrier":
        synchronize()
    else:
        all_reduce(tensor)


@pytest.mark.gpu2
@pytest.mark.parametrize("how", ["sleep", "stop", "kill"])
@pytest.mark.parametrize("call", ["object", "barrier", "traced"])
def test_an_error_names_the_rank_that_does_not_come(call: str, how: str) -> None:
    end = fail_on_gpus(_call_without_a_rank, 2, call, how, absent=1)[0]
    assert end.exit_code == 1, end.output
    # After a death, the launcher's function adds the process to the error.
    assert re.search(r"^(CollectiveError|LaunchError): .*\brank 1\b", end.error, re.S), end.output
