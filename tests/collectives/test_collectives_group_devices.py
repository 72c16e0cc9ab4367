"""Lists of several tensors per rank, as with several devices, compared with plain arithmetic."""

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import assert_outcomes, outcome
from group_calls import assert_same, get_members, now_and_later
from ranks import on_ranks, run_ranks
from tensors_by_rank import BITWISE, COMPLEX, DTYPES, OPS

from stepwrap.collectives import CollectiveGroup

# The number of tensors of each rank.
LENGTHS = [[1, 1, 1], [3, 3, 3], [2, 1, 3]]


def _value(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of two rows, not contiguous, whose products fit in float16."""
    numbers = torch.tensor([[0, 1], [2, 1], [1, 2], [2, 2]]).roll(number, 0)
    return (numbers * (1 - 2j) if dtype.is_complex else numbers).to(dtype).T


def _lists(
    ranks: list[int], lengths: list[int], dtype: torch.dtype
) -> dict[int, list[torch.Tensor]]:
    """Return the list of each rank; some are contiguous and some are not."""
    return {
        rank: [
            value if index % 2 else value.contiguous()
            for index, value in enumerate(_value(rank + i, dtype) for i in range(length))
        ]
        for rank, length in zip(ranks, lengths, strict=False)
    }


def _total(op: str, lists: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    by_rank = [functools.reduce(OPS[op], tensors) for tensors in lists.values()]
    return functools.reduce(OPS[op], by_rank)


def _reduce_lists(group: CollectiveGroup, ranks: list[int], lengths: list[int]) -> None:
    rank, last_rank = dist.get_rank(), ranks[-1]
    for dtype in DTYPES:
        for op in OPS:
            has_no_order = dtype in COMPLEX and op not in ("sum", "product")
            if has_no_order or (dtype.is_floating_point and op in BITWISE):
                continue
            if dtype == torch.bool and op in ("sum", "product"):
                continue
            lists = _lists(ranks, lengths, dtype)
            total, mine = _total(op, lists), lists[rank]
            copies = [tensor.clone() for tensor in mine]
            for _ in now_and_later(
                lambda later, mine=mine, op=op: group.all_reduce_multigpu(mine, op, later)
            ):
                for tensor, before in zip(mine, copies, strict=True):
                    assert_same(tensor, total)
                    tensor.copy_(before)
            chosen = lengths[len(ranks) - 1] - 1
            for _ in now_and_later(
                lambda later, mine=mine, op=op, at=chosen: group.reduce_multigpu(
                    mine, last_rank, op, later, at
                )
            ):
                for index, (tensor, before) in enumerate(zip(mine, copies, strict=True)):
                    is_target = rank == last_rank and index == chosen
                    assert_same(tensor, total if is_target else before)
                    tensor.copy_(before)


def _spread_lists(group: CollectiveGroup, ranks: list[int], lengths: list[int]) -> None:
    rank, last_rank = dist.get_rank(), ranks[-1]
    for dtype in DTYPES:
        mine = _lists(ranks, lengths, dtype)[rank]
        lists = _lists(ranks, lengths, dtype)
        chosen = lengths[len(ranks) - 1] - 1
        for _ in now_and_later(
            lambda later, mine=mine, at=chosen: group.broadcast_multigpu(mine, last_rank, later, at)
        ):
            for index, tensor in enumerate(mine):
                assert_same(tensor, lists[last_rank][chosen])
                tensor.copy_(lists[rank][index])
        gathered = [tensor for r in ranks for tensor in lists[r]]
        outputs = [[torch.zeros_like(tensor) for tensor in gathered] for _ in mine]
        for _ in now_and_later(
            lambda later, mine=mine, outputs=outputs: group.all_gather_multigpu(
                outputs, mine, later
            )
        ):
            for output in outputs:
                for ours, theirs in zip(output, gathered, strict=True):
                    assert_same(ours, theirs)
                    ours.zero_()


@on_ranks(2)
def test_large_and_empty_tensors_are_gathered() -> None:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    for shape in ((300, 300), (2, 0)):
        inputs = [torch.full(shape, 10.0 * rank + i) for i in range(rank + 1)]
        outputs = [[torch.zeros(shape) for _ in range(3)] for _ in inputs]
        group.all_gather_multigpu(outputs, inputs)
        for output in outputs:
            assert torch.equal(
                torch.stack(output), torch.stack([torch.full(shape, v) for v in (0.0, 10, 11)])
            )
    group.destroy()


def _use_lists(ranks: list[int], lengths: list[int]) -> None:
    group, is_member = get_members(ranks)
    if is_member:
        _reduce_lists(group, ranks, lengths)
        _spread_lists(group, ranks, lengths)
        group.destroy()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("ranks", "world_size"), [([1, 3], 4), ([0, 1, 2], 3)])
def test_lists_in_every_dtype(ranks: list[int], world_size: int, lengths: list[int]) -> None:
    run_ranks(_use_lists, world_size, ranks, lengths)


@on_ranks(3)
def test_means_are_over_all_tensors() -> None:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    # Six tensors in all, not three: the mean is over 1 | 2, 3 | 4, 5, 6.
    start = (1, 2, 4)[rank]
    for dtype, expected in (
        (torch.float64, 3.5),
        (torch.complex64, 3.5),
        (torch.float16, 3.5),
        (torch.int32, 4),
        (torch.uint64, 4),
    ):
        for _ in range(2):
            tensors = [torch.tensor([start + i] * 2).to(dtype) for i in range(rank + 1)]
            for ours in now_and_later(
                lambda later, tensors=tensors: group.all_reduce_multigpu(
                    tensors, dist.ReduceOp.AVG, later
                )
            ):
                assert ours is None
                for index, tensor in enumerate(tensors):
                    assert tensor.tolist() == [expected] * 2
                    tensor.copy_(torch.tensor([start + index] * 2))
            group.reduce_multigpu(tensors, 2, "mean", dst_tensor=2)
            if rank == 2:
                assert [tensor[0].item() for tensor in tensors] == [4, 5, expected]
    flags = [torch.tensor([rank == 0, i == 0, False]) for i in range(2)]
    group.all_reduce_multigpu(flags)
    assert [flag.tolist() for flag in flags] == [[True, True, False]] * 2
    group.destroy()


def _reduce_random() -> list[bytes]:
    group = CollectiveGroup.create()
    generator = torch.Generator().manual_seed(dist.get_rank())
    bits = []
    for op in ("sum", "product", "mean", "min"):
        tensors_here = [torch.randn(999, generator=generator) for _ in range(dist.get_rank() + 1)]
        # Repeated from copies, the order of the sums is the same.
        again = [tensor.clone() for tensor in tensors_here]
        for tensors in (tensors_here, again):
            group.all_reduce_multigpu(tensors, op)
        assert all(torch.equal(tensor, tensors_here[0]) for tensor in tensors_here + again)
        bits.append(tensors_here[0].numpy().tobytes())
    group.destroy()
    return bits


def test_all_tensors_of_all_ranks_have_the_same_bits() -> None:
    rank_0, *other_ranks = run_ranks(_reduce_random, 3)
    assert other_ranks == [rank_0, rank_0]


@on_ranks(2)
def test_a_list_of_one_is_reduced_as_torch_does() -> None:
    group = CollectiveGroup.create()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        tensor = torch.randn(999, generator=generator, dtype=torch.float32).to(dtype)
        plain = tensor.clone()
        group.all_reduce_multigpu([tensor])
        dist.all_reduce(plain)
        assert_same(tensor, plain)
    group.destroy()


ONE, WIDE = torch.ones(2), torch.ones(3)
MISTAKES: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("all_reduce_multigpu", ([],), "ValueError", "tensor_list must not be empty"),
    ("all_reduce_multigpu", (ONE,), "TypeError", "tensor_list must be a list of tensors, got Tens"),
    (
        "all_reduce_multigpu",
        ([ONE, WIDE],),
        "ValueError",
        "tensor_list[1] must have the shape (2,) like tensor_list[0], got (3,)",
    ),
    (
        "broadcast_multigpu",
        ([ONE, ONE.int()], 0),
        "ValueError",
        "tensor_list[1] must be torch.float32 like tensor_list[0], got torch.int32",
    ),
    (
        "broadcast_multigpu",
        ([ONE], 0, False, 1),
        "ValueError",
        "src_tensor must be an index of the list of 1 tensors, got 1",
    ),
    ("broadcast_multigpu", ([ONE], 2), "ValueError", "src must be a rank of the group [0, 1], got"),
    ("reduce_multigpu", ([ONE], 2), "ValueError", "dst must be a rank of the group [0, 1], got 2"),
    (
        "reduce_multigpu",
        ([ONE], 0, "sum", False, -1),
        "ValueError",
        "dst_tensor must be an index of the list of 1 tensors, got -1",
    ),
    ("reduce_multigpu", ([ONE * 1j], 0, "max"), "ValueError", "op must be sum, product or mean"),
    (
        "all_gather_multigpu",
        ([[ONE, ONE]], [ONE, ONE]),
        "ValueError",
        "must have one list for each of the 2 tensors in input_tensor_list, got 1",
    ),
    (
        "all_gather_multigpu",
        ([[ONE, ONE], [ONE]], [ONE, ONE]),
        "ValueError",
        "output_tensor_lists[1] must have as many tensors as output_tensor_lists[0], which has 2",
    ),
    (
        "all_gather_multigpu",
        ([[WIDE, WIDE]], [ONE]),
        "ValueError",
        "output_tensor_lists[0][0] must have the shape (2,) like input_tensor_list[0], got (3,)",
    ),
]


def _mistake_lists() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    group = CollectiveGroup.create()
    rank = dist.get_rank()
    alone = (
        []
        if rank
        else [outcome(getattr(group, call), *call_args) for call, call_args, _, _ in MISTAKES]
    )
    inputs = [ONE] * (rank + 1)
    together = [
        # Rank 0 passes room for only two tensors.
        outcome(group.all_gather_multigpu, [[ONE.clone()] * (rank + 2)] * (rank + 1), inputs),
        outcome(group.all_gather_multigpu, [[(ONE, WIDE)[rank]] * 2], [(ONE, WIDE)[rank]]),
    ]
    group.barrier()
    group.destroy()
    return alone, together


def test_mistakes_in_lists() -> None:
    (alone, rank_0), (_, second) = run_ranks(_mistake_lists, 2)
    assert_outcomes(alone, [tuple(mistake[2:]) for mistake in MISTAKES])
    assert rank_0 == second
    (kind, lists_text), (second_kind, sizes_text) = rank_0
    assert kind == second_kind == "ValueError"
    lists = r"all_gather_multigpu\(\) must .* 3 .*1 of rank 0, 2 of rank 1.*got 2 on rank 0$"
    assert re.match(lists, lists_text)
    sizes = r"all_gather_multigpu\(\) must .*same size .*got 8 bytes on rank 0 and 12 on rank 1$"
    assert re.match(sizes, sizes_text)
