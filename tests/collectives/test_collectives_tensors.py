"""Tensors across ranks, under mmengine's names."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import group_of_one, outcome
from ranks import RanksError, on_ranks, run_ranks
from tensors_by_rank import BITWISE, DTYPES, OPS, get_values

from stepwrap.collectives.dist import all_gather, all_gather_object, all_reduce, broadcast, gather


@on_ranks(2)
def test_every_dtype_is_gathered_and_broadcast() -> None:
    """Tensors that are not contiguous, small ones and ones that need a second message."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for repeats in (1, 400):
            by_rank = [get_values(r, dtype, repeats) for r in range(world_size)]
            sent = by_rank[rank]
            for gathered in (all_gather(sent), gather(sent, dst=1)):
                if gathered:
                    assert torch.equal(torch.stack(gathered), torch.stack(by_rank)), dtype
                    assert {received.dtype for received in gathered} == {dtype}
                    sizes = {received.untyped_storage().nbytes() for received in gathered}
                    assert sizes == {sent.nbytes}
            shared = sent.clone()
            broadcast(shared, src=1)
            assert torch.equal(shared, by_rank[1])
            assert torch.equal(sent, by_rank[rank])
            broadcast(sent, src=1)
            assert torch.equal(sent, by_rank[1])
        for odd in (torch.ones((), dtype=dtype), torch.empty(3, 0, dtype=dtype)):
            assert [received.shape for received in all_gather(odd)] == [odd.shape] * world_size
            broadcast(odd)
    assert [len(gather(torch.ones(2), dst)) for dst in range(world_size)] == [
        world_size if rank == dst else 0 for dst in range(world_size)
    ]


@on_ranks(2)
def test_conjugate_tracked_and_deep_tensors() -> None:
    rank = dist.get_rank()
    number = torch.tensor([complex(1, 2 + rank)])
    assert torch.cat(all_gather(number.conj())).tolist() == [1 - 2j, 1 - 3j]
    conjugate = number.conj()
    all_reduce(conjugate)
    assert conjugate.item() == 2 - 5j
    assert number.item() == 2 + 5j
    imaginary = torch.tensor([complex(1, 2 + rank)]).conj().imag
    broadcast(imaginary, src=1)
    assert imaginary.item() == -3
    tracked = torch.full((2,), float(rank), requires_grad=True)
    assert not any(received.requires_grad for received in all_gather(tracked))
    all_reduce(tracked)
    assert tracked.requires_grad
    assert tracked.tolist() == [1.0, 1.0]
    broadcast(torch.ones(2, requires_grad=True))
    deep = torch.full((1,) * 18 + (2,), float(rank))
    assert [received.shape for received in all_gather(deep)] == [deep.shape] * 2
    torch.set_default_dtype(torch.float64)
    gathered = all_gather(torch.ones(3))
    gathered[0].add_(1)
    assert [received.tolist() for received in gathered] == [[2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("shape", "ValueError", "torch.float32 of shape (3, 1000)"),
        ("dtype", "ValueError", "torch.float64 of shape (3,)"),
        ("deep", "ValueError", "torch.float32 of shape (3, 1, "),
    ],
)
@on_ranks(2)
def test_unequal_tensors_are_an_error_on_every_rank(kind: str, error: str, text: str) -> None:
    rank = dist.get_rank()
    data: Any = torch.ones(3)
    if rank == 1:
        data = {
            "shape": torch.ones(3, 1000),
            "dtype": torch.ones(3, dtype=torch.float64),
            "deep": torch.ones((3,) + (1,) * 17),
        }[kind]
    outcomes = [outcome(all_gather, data), outcome(gather, data, 1)]
    # No rank is left waiting.
    assert torch.stack(all_gather(torch.tensor(rank))).tolist() == [0, 1]
    for name, message in outcomes:
        assert name == error
        assert "got torch.float32 of shape (3,)" in message
        assert text in message
        assert "on rank 0; " in message
        assert "on rank 1" in message


@on_ranks(2)
def test_another_call_is_an_error_on_every_rank() -> None:
    data = torch.ones(2)
    calls: list[Callable[..., Any]] = [all_gather, all_gather_object, gather]
    order = calls if dist.get_rank() == 0 else [calls[1], calls[2], calls[0]]
    outcomes = [outcome(call, data) for call in order]
    names = ["all_gather", "all_gather_object", "gather"]
    for (error, message), call_name, other in zip(
        outcomes, names, [*names[1:], names[0]], strict=True
    ):
        assert error == "CollectiveError"
        assert f"in {call_name} (" in message
        assert f"in {other} (" in message


def _use_subgroup() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    other = dist.new_group([0, 2])
    subgroup = group if rank in (1, 3) else other
    low_rank, second = (1, 3) if rank in (1, 3) else (0, 2)
    data = torch.tensor([float(rank)])
    assert torch.cat(all_gather(data, subgroup)).tolist() == [low_rank, second]
    for dst in (low_rank, second):
        gathered = gather(data, dst, subgroup)
        assert [received.item() for received in gathered] == (
            [low_rank, second] if rank == dst else []
        )
    large = [received.unique().tolist() for received in all_gather(data.repeat(2**17), subgroup)]
    assert large == [[low_rank], [second]]
    shared = data.clone()
    broadcast(shared, second, subgroup)
    assert shared.item() == second
    all_reduce(data, "mean", subgroup)
    assert data.item() == (low_rank + second) / 2
    foreign = other if subgroup is group else group
    calls: list[Callable[..., Any]] = [
        functools.partial(broadcast, data, 4, subgroup),
        functools.partial(gather, data, 5, subgroup),
        functools.partial(all_gather, data, foreign),
        functools.partial(all_reduce, data, "sum", foreign),
        functools.partial(gather, torch.ones(rank + 1), second, subgroup),
        functools.partial(gather, data, rank, subgroup),
    ]
    return [outcome(call) for call in calls]


def test_subgroups_take_global_ranks() -> None:
    results = run_ranks(_use_subgroup, 4)
    assert [name for outcomes in results for name, _ in outcomes] == ["ValueError"] * 24
    texts = [text for _, text in results[3]]
    assert re.match(r"src must .*\[1, 3\], got 4$", texts[0])
    assert texts[1].startswith("gather() on rank 1 (")
    assert re.search(r"\): dst must .*\[1, 3\], got 5$", texts[1])
    assert texts[2] == texts[3]
    assert re.match("rank 3 .*not a member", texts[2])
    assert re.search(r"\(2,\) for rank 3 on rank 1; .*\(4,\)", texts[4])
    assert re.match(r"gather\(\) must .*shape, dtype.* dst ", texts[5])
    assert re.search(r"\(1,\) for rank 1 on rank 1; .*\(1,\) .*rank 3", texts[5])


def test_one_process_changes_nothing() -> None:
    data = torch.ones(2)
    assert all_gather(data)[0] is data
    assert gather(data)[0] is data
    for op in OPS.keys() - BITWISE:
        all_reduce(data, op)
    broadcast(data)
    assert data.tolist() == [1.0, 1.0]


OPERATIONS = "op must be one of sum, product, min, max, band, bor, bxor, mean"

WRONG: list[tuple[Callable[..., object], tuple[Any, ...], str, str]] = [
    (all_reduce, (torch.ones(1), "maen"), "ValueError", f"{OPERATIONS}, got 'maen'; did you"),
    (all_reduce, (torch.ones(1), 3), "ValueError", f"{OPERATIONS}, got 3"),
    (all_reduce, (torch.ones(1), "band"), "ValueError", "op must not be bitwise for torch.float32"),
    (all_reduce, (torch.ones(1) + 1j, "max"), "ValueError", "op must be sum, product or mean for"),
    (all_reduce, (1.0,), "TypeError", "data must be a torch.Tensor, got float"),
    (all_gather, ([1.0],), "TypeError", "data must be a torch.Tensor, got list"),
    (gather, (1.0,), "TypeError", "data must be a torch.Tensor, got float"),
    (gather, (torch.ones(1), 1), "ValueError", "dst must be a rank of the group [0], got 1"),
    (broadcast, (1.0,), "TypeError", "data must be a torch.Tensor, got float"),
    (broadcast, (torch.ones(1), 1), "ValueError", "src must be a rank of the group [0], got 1"),
]


@pytest.mark.parametrize(("call", "args", "error", "text"), WRONG)
def test_arguments_are_checked_in_one_process_too(
    call: Callable[..., object], args: tuple[Any, ...], error: str, text: str
) -> None:
    name, message = outcome(call, *args)
    assert (name, message[: len(text)]) == (error, text)


def _lose_a_rank() -> tuple[str, str]:
    return outcome(all_reduce, torch.ones(2)) if dist.get_rank() == 0 else ("", "")


def test_a_rank_that_never_comes_is_an_error_of_the_transport() -> None:
    try:
        results = run_ranks(_lose_a_rank, 2, group_timeout_s=1)
    except RanksError as error:
        pytest.fail(str(error))
    assert results[0][0] == "CollectiveError"
    assert "all_reduce" in results[0][1]


@pytest.mark.gpu
@on_ranks(1, init=False)
def test_nccl_with_one_rank() -> None:
    with group_of_one("nccl"):
        data = torch.arange(6.0, device="cuda").reshape(2, 3).T
        for op in OPS.keys() - BITWISE:
            all_reduce(data, op)
        broadcast(data)
        assert all_gather(data)[0] is data
        assert gather(data)[0] is data


@pytest.mark.gpu
@on_ranks(2)
def test_two_gloo_ranks_share_a_device() -> None:
    rank = dist.get_rank()
    for dtype in DTYPES:
        tensor = get_values(rank, dtype).cuda()
        gathered = all_gather(tensor)
        assert {received.device for received in gathered} == {tensor.device}
        assert torch.equal(gathered[1].cpu(), get_values(1, dtype))
        broadcast(tensor, 1)
        assert torch.equal(tensor.cpu(), get_values(1, dtype))
        all_reduce(tensor, "product")
        assert torch.equal(tensor.cpu(), get_values(1, dtype) * get_values(1, dtype))


@pytest.mark.gpu
@on_ranks(2)
def test_tensors_on_different_devices_meet_in_one_place() -> None:
    rank = dist.get_rank()
    for count in (3, 2**16):
        tensor = torch.full((count,), float(rank), device=["cpu", "cuda"][rank])
        for gathered in (all_gather(tensor), gather(tensor, 1)):
            assert [received.unique().item() for received in gathered] in ([], [0.0, 1.0])
            assert {received.device for received in gathered} <= {tensor.device}
