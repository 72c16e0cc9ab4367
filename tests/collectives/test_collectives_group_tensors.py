"""Tensor collectives of a group, synchronous and asynchronous, against plain torch."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_calls import assert_same, get_members, now_and_later
from ranks import on_ranks, run_ranks
from tensors_by_rank import BITWISE, COMPLEX, DTYPES, OPS, get_values

from stepwrap.collectives import CollectiveGroup

DTYPES_AND_LARGER = [(dtype, 1) for dtype in DTYPES] + [(torch.complex64, 9000)]


def _move(group: CollectiveGroup, ranks: list[int], dtype: torch.dtype, repeats: int) -> None:
    """Check the collectives that only move values, with tensors that are not contiguous."""
    rank, position, last_rank = dist.get_rank(), ranks.index(dist.get_rank()), ranks[-1]
    mine = [get_values(r, dtype, repeats) for r in ranks]
    tensor = mine[position]
    for _ in now_and_later(lambda later: group.broadcast(tensor, last_rank, later)):
        assert_same(tensor, mine[-1])
        tensor.copy_(mine[position] if rank == last_rank else get_values(rank, dtype, repeats))
    tensor_sent = get_values(rank, dtype, repeats)
    received = [torch.zeros_like(tensor_sent) for _ in ranks]
    for _ in now_and_later(lambda later: group.all_gather(received, tensor_sent, later)):
        for r, rank_tensor in zip(ranks, received, strict=True):
            assert_same(rank_tensor, get_values(r, dtype, repeats))
            rank_tensor.zero_()
    gathered = received if rank == last_rank else None
    for _ in now_and_later(lambda later: group.gather(tensor_sent, gathered, last_rank, later)):
        for r, rank_tensor in zip(ranks, gathered or [], strict=rank == last_rank):
            assert_same(rank_tensor, get_values(r, dtype, repeats))
            rank_tensor.zero_()
    dealt = [get_values(10 + r, dtype, repeats) for r in ranks] if rank == last_rank else None
    target = torch.zeros_like(tensor_sent)
    for _ in now_and_later(lambda later: group.scatter(target, dealt, last_rank, later)):
        assert_same(target, get_values(10 + rank, dtype, repeats))
        target.zero_()
    offers = [get_values(10 * rank + r, dtype, repeats) for r in ranks]
    for _ in now_and_later(lambda later: group.all_to_all(received, offers, later)):
        for r, rank_tensor in zip(ranks, received, strict=True):
            assert_same(rank_tensor, get_values(10 * r + rank, dtype, repeats))
            rank_tensor.zero_()


def _move_every_dtype(ranks: list[int]) -> None:
    group, is_member = get_members(ranks)
    if is_member:
        for dtype, repeats in DTYPES_AND_LARGER:
            _move(group, ranks, dtype, repeats)
        group.destroy()


@pytest.mark.parametrize(("ranks", "world_size"), [([0, 1], 2), ([1, 3], 4), ([0, 1, 2], 3)])
def test_values_move_in_every_dtype(ranks: list[int], world_size: int) -> None:
    run_ranks(_move_every_dtype, world_size, ranks)


def _expected(op: str, by_rank: list[torch.Tensor]) -> torch.Tensor:
    if by_rank[0].dtype == torch.bool and op in ("sum", "product"):
        op = {"sum": "bor", "product": "band"}[op]
    return functools.reduce(OPS[op], by_rank)


def _reduce(group: CollectiveGroup, ranks: list[int], dtype: torch.dtype, op: Any) -> None:
    rank, last_rank, name = dist.get_rank(), ranks[-1], _name(op)
    original, total = (
        get_values(rank, dtype),
        _expected(name, [get_values(r, dtype) for r in ranks]),
    )
    tensor = original.clone()
    for _ in now_and_later(lambda later: group.all_reduce(tensor, op, later)):
        assert_same(tensor, total)
        tensor.copy_(original)
    for result in (original.clone(), original.contiguous()):
        for _ in now_and_later(
            lambda later, result=result: group.reduce(result, last_rank, op, later)
        ):
            # The other ranks' tensors are unchanged.
            assert_same(result, total if rank == last_rank else original)
            result.copy_(original)
    offers = [get_values(rank + r, dtype) for r in ranks]
    reduced = torch.zeros_like(original)
    for _ in now_and_later(lambda later: group.reduce_scatter(reduced, offers, op, later)):
        assert_same(reduced, _expected(name, [get_values(rank + r, dtype) for r in ranks]))
        reduced.zero_()


def _name(op: Any) -> str:
    return op if isinstance(op, str) else op.name.lower()


def _reduce_every_dtype(ranks: list[int]) -> None:
    group, is_member = get_members(ranks)
    if is_member:
        for dtype in DTYPES:
            for op in OPS:
                has_no_order = dtype in COMPLEX and op not in ("sum", "product")
                if has_no_order or (dtype.is_floating_point and op in BITWISE):
                    continue
                _reduce(group, ranks, dtype, getattr(dist.ReduceOp, op.upper()))
        _reduce(group, ranks, torch.float32, "product")
        group.destroy()


@pytest.mark.parametrize(("ranks", "world_size"), [([1, 3], 4), ([0, 1, 2], 3)])
def test_every_operation_in_every_dtype(ranks: list[int], world_size: int) -> None:
    run_ranks(_reduce_every_dtype, world_size, ranks)


@on_ranks(3)
def test_means() -> None:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    for op in (dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.AVG), "mean"):
        for values, dtype in (([1.0, 2.5], torch.float64), ([1 + 2j, 4], torch.complex64)):
            tensor = torch.tensor(values, dtype=dtype) * (rank + 1)
            output = tensor.clone()
            group.all_reduce(tensor, op)
            assert_same(tensor, torch.tensor(values, dtype=dtype) * 2)
            group.reduce_scatter(output, [output.clone()] * 3, op)
            assert_same(output, tensor)
    # The sum overflows in float16. Integers are rounded, ties to the even neighbour.
    half = torch.full((2,), 60000.0, dtype=torch.float16)
    group.all_reduce(half, "mean")
    assert half.tolist() == [60000.0] * 2
    integers = torch.tensor([rank, 3 * rank + 1, 5])
    group.all_reduce(integers, "mean")
    assert integers.tolist() == [1, 4, 5]
    group.destroy()


def _random(rank: int, count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@on_ranks(3)
def test_floats_equal_the_results_of_torch() -> None:
    group = CollectiveGroup.create()
    rank, size = dist.get_rank(), dist.get_world_size()
    ours, theirs = _random(rank), _random(rank)
    group.all_reduce(ours)
    dist.all_reduce(theirs)
    assert_same(ours, theirs)
    ours, theirs = _random(rank), _random(rank)
    group.reduce(ours, 2)
    dist.reduce(theirs, 2)
    if rank == 2:
        assert_same(ours, theirs)
    offers = [_random(10 * rank + r) for r in range(size)]
    for op in ("sum", "product", "max"):
        group.reduce_scatter(ours, offers, op)
        in_order = [_random(10 * r + rank) for r in range(size)]
        assert_same(ours, functools.reduce(OPS[op], in_order))
    dist.reduce_scatter(theirs, offers, dist.ReduceOp.MAX)
    assert_same(ours, theirs)
    group.destroy()


@on_ranks(3)
def test_shapes_may_differ_where_each_rank_knows_them() -> None:
    group = CollectiveGroup.create()
    rank, size = dist.get_rank(), dist.get_world_size()
    # Rank 0 sends empty tensors.
    for scale in (1, 200_000):
        received = [torch.zeros(scale * r) for r in range(size)]
        for _ in now_and_later(
            lambda later, received=received, scale=scale: group.all_gather(
                received, torch.full((scale * rank,), float(rank)), later
            )
        ):
            for r, rank_tensor in enumerate(received):
                assert_same(rank_tensor, torch.full((scale * r,), float(r)))
                rank_tensor.zero_()
    offers = [torch.full((rank, r), 10 * rank + r) for r in range(size)]
    outputs = [torch.zeros(r, rank, dtype=torch.int64) for r in range(size)]
    for _ in now_and_later(lambda later: group.all_to_all(outputs, offers, later)):
        for r, output in enumerate(outputs):
            assert_same(output, torch.full((r, rank), 10 * r + rank))
            output.zero_()
    empty = torch.empty(2, 0)
    group.broadcast(empty, 1)
    group.all_reduce(empty)
    group.reduce_scatter(empty, [empty] * size)
    scalar = torch.tensor(float(rank))
    group.all_reduce(scalar)
    assert scalar.item() == 3
    group.destroy()


@on_ranks(2)
def test_views_and_parameters() -> None:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    number = torch.tensor([complex(1, 2 + rank)])
    group.all_reduce(number.conj())
    assert number.item() == 2 + 5j
    negative = torch.tensor([complex(1, 2 + rank)]).conj().imag
    assert negative.is_neg()
    group.broadcast(negative, 1)
    assert negative.item() == -3
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    group.all_reduce(weight.T)
    assert_same(weight.data, torch.ones(2, 3))
    assert weight.requires_grad
    assert weight.grad is None
    # Source tensors may be expanded.
    received = [torch.zeros(3), torch.zeros(3)]
    group.all_gather(received, torch.tensor(float(rank)).expand(3))
    assert torch.stack(received).tolist() == [[0] * 3, [1] * 3]
    group.destroy()


@on_ranks(2)
def test_calls_may_overlap() -> None:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    tensors = [torch.tensor([complex(i, rank)]).conj() for i in range(8)]
    handles = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    handles.append(group.barrier(async_op=True))
    # Each rank waits in another order.
    for handle in handles[:: -1 if rank else 1]:
        handle.wait()
    assert [tensor.item() for tensor in tensors] == [complex(2 * i, -1) for i in range(8)]
    group.destroy()
