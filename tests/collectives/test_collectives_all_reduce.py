"""One tensor, reduced over the ranks in place."""

import functools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from calls import messages_of_collectives, outcome
from marks import slow
from ranks import on_ranks, run_ranks
from tensors_by_rank import BITWISE, DTYPES, INTEGERS, OPS, get_values

import stepwrap.collectives
from stepwrap.collectives.dist import all_reduce


def _allowed(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in ("sum", "product")
    return not (dtype.is_floating_point and op in BITWISE)


def _reduce_every_dtype() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        by_rank = [get_values(r, dtype) for r in range(world_size)]
        for op, function in OPS.items():
            tensor = by_rank[rank].clone(memory_format=torch.preserve_format)
            contiguous = by_rank[rank].contiguous()
            if not _allowed(op, dtype):
                assert outcome(all_reduce, tensor, op)[0] == "ValueError"
                continue
            # torch adds bools as "or" and multiplies them as "and".
            expected = functools.reduce(function, by_rank)
            assert all_reduce(tensor, op) is None  # type: ignore[func-returns-value]
            all_reduce(contiguous, op)
            assert torch.equal(tensor, expected), (dtype, op)
            assert torch.equal(contiguous, expected), (dtype, op)
            assert tensor.stride() == by_rank[rank].stride()
        zero_dim, empty = torch.ones((), dtype=dtype), torch.empty(0, 3, dtype=dtype)
        all_reduce(zero_dim, "product")
        all_reduce(empty)
        assert zero_dim.item() == 1
    for narrow in (torch.uint16, torch.uint32):
        tensor = torch.tensor([rank, 65_535]).to(narrow)
        all_reduce(tensor, "max")
        assert tensor.tolist() == [world_size - 1, 65_535]


@pytest.mark.parametrize("world_size", [2, *slow(3)])
@pytest.mark.slow
def test_every_dtype_is_reduced_by_every_operation(world_size: int) -> None:
    run_ranks(_reduce_every_dtype, world_size)


@on_ranks(2)
def test_means_keep_their_dtype_and_are_rounded_with_one_warning() -> None:
    rank = dist.get_rank()
    floats = torch.tensor([1.0 + rank])
    all_reduce(floats, "mean")
    assert floats.tolist() == [1.5]
    with messages_of_collectives() as messages:
        exact = torch.tensor([[1, 2], [3, 4]][rank])
        all_reduce(exact, "mean")
        assert exact.dtype == torch.int64
        assert exact.tolist() == [2, 3]
        assert not messages
        for dtype in INTEGERS:
            tensor = torch.tensor([1 + rank, 2 + rank, 2 * rank, 100 + rank], dtype=dtype)
            all_reduce(tensor, "mean")
            assert tensor.dtype == dtype
            # 1.5 and 2.5 round to the even neighbour; the sum of the last needs more than 8 bits.
            assert tensor.tolist() == [2, 2, 1, 100]
        negative = torch.tensor([-1 - rank, -3 * rank, 2**60 + 2 * rank])
        all_reduce(negative, "mean")
        assert negative.tolist() == [-2, -2, 2**60 + 1]
        half = torch.tensor([40_000.0 + 64 * rank], dtype=torch.float16)
        all_reduce(half, "mean")
        assert half.item() == 40_032.0
        number = torch.tensor([complex(1, rank)])
        all_reduce(number, "MEAN")
        assert number.item() == 1 + 0.5j
        flags = torch.tensor([True, rank == 0])
        all_reduce(flags, "mean")
        assert flags.tolist() == [True, False]
    assert len(messages) <= 1
    assert all("nearest integer" in message for message in messages)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@on_ranks(3)
def test_means_and_wide_sums_of_large_integers_do_not_wrap(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    largest, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    for values in (
        [largest, largest, largest],
        [least, least, least],
        [largest, largest - 7, largest - 1],
        [least, least + 1, least + 4],
        [largest, 0, largest],
        [largest, least, 5],
    ):
        # Python's integers are exact, and round() goes to the nearest.
        exact = Fraction(sum(values), 3)
        tensor = torch.tensor([values[rank], rank], dtype=dtype)
        all_reduce(tensor, "mean")
        assert tensor.tolist() == [round(exact), 1], values
        tensors = {"n": torch.tensor([values[rank]], dtype=dtype)}
        mean = stepwrap.collectives.all_reduce_dict(tensors, "mean")["n"]
        assert mean.tolist() == [pytest.approx(float(exact), rel=1e-15, abs=1e-15)], values
        total = stepwrap.collectives.all_reduce_dict(tensors, "sum")["n"]
        assert total.tolist() == [float(sum(values))], values


@on_ranks(3)
def test_thirds_go_to_the_nearest() -> None:
    tensor = torch.tensor([[0, 0, -1], [1, 1, -1], [0, 1, 0]][dist.get_rank()])
    all_reduce(tensor, "mean")
    assert [int(value) for value in tensor] == [0, 1, -1]
