"""Parameters and lists of objects across ranks, in place."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import assert_outcomes, outcome
from ranks import on_ranks, run_ranks

from stepwrap.collectives.dist import all_reduce_dict, all_reduce_params, broadcast_object_list


def _params(rank: int) -> list[torch.Tensor]:
    tied = torch.nn.Parameter(torch.full((3,), 1.0 + rank))
    return [
        tied,
        torch.nn.Parameter((torch.arange(12.0).reshape(3, 4) + rank).T),
        torch.full((2, 2), 2.0 + rank, dtype=torch.float64),
        tied,
        torch.tensor([3, 4 + 2 * rank]),
        torch.tensor(complex(rank, 1)),
        torch.full((600, 600), float(rank)),
        torch.empty(0),
    ]


@pytest.mark.parametrize(
    ("coalesce", "bucket_size_mb"), [(True, -1), (True, 1), (True, 1e-5), (False, -1)]
)
@on_ranks(2)
def test_params_are_reduced_in_place(coalesce: bool, bucket_size_mb: float) -> None:
    rank = dist.get_rank()
    for op in ("sum", "mean", "product"):
        params, rank_0, second = _params(rank), _params(0), _params(1)
        generator = (tensor for tensor in params)
        all_reduce_params(generator, coalesce, bucket_size_mb, op)
        for mine, rank_0_param, two in zip(params, rank_0, second, strict=True):
            expected = rank_0_param * two if op == "product" else rank_0_param + two
            if op == "mean":
                expected = expected / 2
            assert torch.equal(mine, expected.to(mine.dtype)), (op, mine)
        assert params[0].requires_grad
        assert params[0].grad is None


def _count_reductions() -> list[int]:
    counts: list[int] = []
    reduce = dist.all_reduce
    tensors = [torch.ones(2**17) for _ in range(6)] + [torch.ones(3, dtype=torch.float64)]
    for coalesce, bucket_size_mb in ((True, -1), (True, 1), (False, -1)):
        sizes: list[int] = []

        def count(
            tensor: torch.Tensor, *args: Any, num_bytes: list[int] = sizes, **options: Any
        ) -> object:
            num_bytes.append(tensor.nbytes)
            return reduce(tensor, *args, **options)

        dist.all_reduce = count
        try:
            all_reduce_params(iter(tensors), coalesce, bucket_size_mb)
        finally:
            dist.all_reduce = reduce
        counts.append(len(sizes))
    return counts


def test_buckets_are_made_by_dtype_and_size() -> None:
    assert run_ranks(_count_reductions, 2) == [[2, 4, 7]] * 2


def _failing() -> Iterator[torch.Tensor]:
    yield torch.ones(2)
    raise LookupError("no more")


@on_ranks(2)
def test_differing_params_are_an_error_on_every_rank() -> None:
    rank = dist.get_rank()
    a, b = torch.ones(2), torch.ones(3)
    outcomes = [
        outcome(all_reduce_params, [a, b] if rank == 0 else [b, a]),
        outcome(all_reduce_params, [a, b] if rank == 0 else [a]),
        outcome(all_reduce_params, [a] if rank == 0 else [a.double()]),
        outcome(all_reduce_params, [a], True, -1 if rank == 0 else 2),
        outcome(all_reduce_params, [a] if rank == 0 else [1.0]),
        outcome(all_reduce_params, [a] if rank == 0 else _failing()),
        outcome(all_reduce_params, [a], True, -1, "band"),
    ]
    assert a.tolist() == [1.0, 1.0]
    expected = [
        ("ValueError", "0 is torch.float32 of shape (2,) on cpu on rank 0 and torch.float32 of"),
        ("ValueError", "keys missing on rank 1: 1"),
        ("ValueError", "on rank 0 and torch.float64 of shape (2,) on cpu on rank 1"),
        ("ValueError", "bucket_size_mb=-1 on rank 0 and 'sum' with coalesce=True and bucket"),
        ("TypeError", "params[0] must be a tensor, got float"),
        ("LookupError", "no more"),
        ("ValueError", "params[0]: op must not be bitwise for torch.float32"),
    ]
    assert_outcomes(outcomes, expected)


@on_ranks(2)
def test_an_object_list_is_overwritten() -> None:
    rank = dist.get_rank()
    source = [1, {"a": torch.ones(2)}, None, "text"]
    received: list[Any] = source if rank == 1 else [None] * 4
    same = received
    assert broadcast_object_list(received, src=1) is None  # type: ignore[func-returns-value]
    assert same is received
    assert received[0] == 1
    assert received[1]["a"].tolist() == [1.0, 1.0]
    assert received[2:] == [None, "text"]
    assert (received[1] is source[1]) == (rank == 1)
    nothing: list[object] = []
    broadcast_object_list(nothing)
    outcomes = [
        outcome(broadcast_object_list, [0] * (2 + rank)),
        outcome(broadcast_object_list, [0] if rank == 0 else (0,)),
        outcome(broadcast_object_list, [lambda: None], 1),
        outcome(broadcast_object_list, [0], 2 if rank else 0),
        outcome(broadcast_object_list, [0], rank),
    ]
    expected = [
        ("ValueError", "{0: '2 objects from rank 0', 1: '3 objects from rank 0'}"),
        ("AssertionError", "): data must be a list, got tuple"),
        ("CollectiveError", "pickle"),
        ("ValueError", "() on rank 1 (tests/collectives/calls.py:"),
        ("ValueError", "{0: '1 objects from rank 0', 1: '1 objects from rank 1'}"),
    ]
    assert_outcomes(outcomes, expected)


def _use_subgroup() -> list[tuple[str, str]]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, foreign = groups[rank % 2], groups[1 - rank % 2]
    partner = (rank + 2) % 4
    data: dict[str, Any] = {"a": torch.tensor(rank), "b": torch.tensor([float(rank)])}
    all_reduce_dict(data, "sum", group)
    assert data["a"].item() == rank + partner
    param = torch.nn.Parameter(torch.tensor([float(rank)]))
    all_reduce_params([param], op="max", group=group)
    assert param.item() == max(rank, partner)
    objects: list[object] = [rank]
    broadcast_object_list(objects, max(rank, partner), group)
    assert objects == [max(rank, partner)]
    calls: list[Callable[..., Any]] = [
        functools.partial(all_reduce_dict, {str(rank): torch.ones(1)}, "sum", group),
        functools.partial(broadcast_object_list, [0] * (1 + rank), partner % 2 + 2, group),
        functools.partial(all_reduce_dict, data, "sum", foreign),
        functools.partial(all_reduce_params, [param], group=foreign),
    ]
    return [outcome(call) for call in calls]


def test_subgroups_name_global_ranks() -> None:
    results = run_ranks(_use_subgroup, 4)
    assert [name for outcomes in results for name, _ in outcomes] == ["ValueError"] * 16
    texts = [text for _, text in results[3]]
    assert re.search("missing .*rank 3: 1; .*missing .*rank 1: 3", texts[0])
    assert re.search("1: '2 .*rank 3', 3: '4 .*rank 3'", texts[1])
    assert texts[2] == texts[3]
    assert re.match("rank 3 .*not a member", texts[2])


def test_one_process_changes_nothing() -> None:
    tensor = torch.ones(2)
    data = {"a": tensor, "n": 1}
    all_reduce_dict(data, "mean")
    assert data["a"] is tensor
    assert data["n"] == 1
    params = iter([tensor])
    all_reduce_params(params)
    assert next(params) is tensor
    objects = [tensor]
    broadcast_object_list(objects)
    assert objects[0] is tensor


@pytest.mark.parametrize(
    ("call", "args", "error", "text"),
    [
        (all_reduce_dict, ([1],), "AssertionError", "data must be a dict, got list"),
        (all_reduce_dict, ({}, "avg"), "ValueError", "op must be one of sum, "),
        (all_reduce_dict, ({"a": "b"},), "TypeError", "data['a'] must be a tensor or a number"),
        (all_reduce_dict, ({"a": 1j}, "min"), "ValueError", "data['a']: op must be sum, product"),
        (all_reduce_params, ([], True, -1, "avg"), "ValueError", "op must be one of sum, "),
        (all_reduce_params, ([], True, 0), "ValueError", "bucket_size_mb must be positive or -1"),
        (broadcast_object_list, ((1,),), "AssertionError", "data must be a list, got tuple"),
        (broadcast_object_list, ([1], 3), "ValueError", "src must be a rank of the group [0]"),
    ],
)
def test_arguments_are_checked_in_one_process_too(
    call: Callable[..., object], args: tuple[Any, ...], error: str, text: str
) -> None:
    name, message = outcome(call, *args)
    assert (name, message[: len(text)]) == (error, text)


@pytest.mark.gpu
@on_ranks(2)
def test_two_gloo_ranks_share_a_device() -> None:
    rank = dist.get_rank()
    data: dict[str, Any] = {"a": torch.tensor([1 + rank], device="cuda"), "b": torch.tensor(rank)}
    all_reduce_dict(data)
    assert data["a"].device.type == "cuda"
    assert data["a"].item() == 3
    assert data["b"].device.type == "cpu"
    param = torch.nn.Parameter(torch.full((4,), float(rank), device="cuda"))
    all_reduce_params([param, torch.nn.Parameter(param.detach().clone())], op="mean")
    assert param.tolist() == [0.5] * 4
