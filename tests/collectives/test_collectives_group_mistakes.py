"""Mistakes in calls of a group, and the ranks on which they raise."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from calls import HERE, assert_outcomes, outcome, traced
from group_calls import get_members
from ranks import run_ranks

from stepwrap.collectives import CollectiveGroup, recent_collectives

ONE, WIDE = torch.ones(2), torch.ones(3)
NO_MEMBER = "must be a rank of the group [1, 3], got 0"
# The arguments of rank 1 in the group [1, 3]; `dst` and `src` default to rank 0.
MISTAKES: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("broadcast", (ONE, 0), "ValueError", f"src {NO_MEMBER}"),
    ("broadcast", ([1.0], 1), "TypeError", "tensor must be a torch.Tensor, got list"),
    ("broadcast", (ONE.to("meta"), 1), "ValueError", "tensor must have values"),
    ("broadcast", (torch.ones(1).expand(2), 3), "ValueError", "tensor must not be expanded"),
    ("all_reduce", (torch.eye(2).to_sparse(),), "ValueError", "tensor must be a dense"),
    ("all_reduce", (torch.ones(1).expand(2),), "ValueError", "tensor must not be expanded"),
    ("all_reduce", (ONE, "avg"), "ValueError", "op must be one of sum, product, min, max"),
    ("all_reduce", (ONE, dist.ReduceOp.PREMUL_SUM), "ValueError", "got 'premul_sum'"),
    ("all_reduce", (ONE * 1j, dist.ReduceOp.MAX), "ValueError", "sum, product or mean for torch.c"),
    ("all_reduce", (ONE, dist.ReduceOp.BAND), "ValueError", "op must not be bitwise for torch.flo"),
    ("reduce", (ONE, 0), "ValueError", f"dst {NO_MEMBER}"),
    ("reduce", (ONE * 1j, 1, "min"), "ValueError", "op must be sum, product or mean"),
    ("all_gather", (ONE, ONE), "TypeError", "tensor_list must be a list of tensors, got Tensor"),
    (
        "all_gather",
        ([ONE], ONE),
        "ValueError",
        "tensor_list must have 2 tensors, one for each of the ranks [1, 3], got 1",
    ),
    (
        "all_gather",
        ([WIDE, ONE], ONE),
        "ValueError",
        "tensor_list[0] must have the shape (2,) like tensor, got (3,)",
    ),
    (
        "all_gather",
        ([ONE, ONE.int()], ONE),
        "ValueError",
        "tensor_list[1] must be torch.float32 like tensor_list[0], got torch.int32",
    ),
    ("all_gather", ([ONE, None], ONE), "TypeError", "tensor_list[1] must be a torch.Tensor, got N"),
    ("gather", (ONE, None), "ValueError", f"dst {NO_MEMBER}"),
    ("gather", (ONE, None, 1), "TypeError", "gather_list must be a list of tensors, got NoneType"),
    (
        "gather",
        (ONE, [ONE, ONE], 3),
        "ValueError",
        "gather_list must be None on all ranks except 3",
    ),
    ("gather", (ONE, [ONE, WIDE], 1), "ValueError", "gather_list[1] must have the shape"),
    ("scatter", (ONE, None), "ValueError", f"src {NO_MEMBER}"),
    ("scatter", (ONE, [ONE], 1), "ValueError", "scatter_list must have 2 tensors, one for each"),
    (
        "scatter",
        (ONE, [ONE, ONE], 3),
        "ValueError",
        "scatter_list must be None on all ranks except 3",
    ),
    ("scatter", (ONE, [ONE.int()] * 2, 1), "ValueError", "scatter_list[0] must be torch.float32"),
    ("reduce_scatter", (ONE, [WIDE, ONE]), "ValueError", "input_list[0] must have the shape (2,)"),
    ("reduce_scatter", (ONE, [ONE] * 3), "ValueError", "input_list must have 2 tensors, one for"),
    ("reduce_scatter", (ONE, [ONE, ONE], "or"), "ValueError", "op must be one of"),
    ("all_to_all", ([ONE] * 2, [ONE]), "ValueError", "input_tensor_list must have 2 tensors, one"),
    ("all_to_all", ([ONE] * 2, []), "ValueError", "input_tensor_list must not be empty"),
    (
        "all_to_all",
        ([WIDE, ONE], [ONE, ONE]),
        "ValueError",
        "output_tensor_list[0] must have the shape (2,) like input_tensor_list[0], got (3,)",
    ),
    ("monitored_barrier", (0,), "ValueError", "timeout_s must be positive, got 0"),
    ("broadcast_object", (1, 0), "ValueError", f"src {NO_MEMBER}"),
    ("gather_object", (1,), "ValueError", f"dst {NO_MEMBER}"),
    ("scatter_object", ([1, 2],), "ValueError", f"src {NO_MEMBER}"),
]


def _mistake_alone() -> list[tuple[str, str]]:
    group, is_member = get_members([1, 3])
    endings = []
    if dist.get_rank() == 1:
        endings = [outcome(getattr(group, call), *call_args) for call, call_args, _, _ in MISTAKES]
    if is_member:
        # No message was sent.
        group.barrier()
        group.destroy()
    return endings


def test_mistakes_are_found_before_anything_is_sent() -> None:
    endings = run_ranks(_mistake_alone, 4)[1]
    assert_outcomes(endings, [tuple(mistake[2:]) for mistake in MISTAKES])


def _mistake_while_traced() -> list[tuple[str, str]]:
    group = CollectiveGroup.create()
    two = [torch.ones(2), torch.ones(2)]
    calls: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
        ("all_reduce", (ONE.clone(),), ([1.0],)),
        ("all_gather", (two, ONE), (None, None)),
        ("all_to_all", (two, two), (two, 1)),
        ("all_reduce_multigpu", (two,), ([],)),
        ("reduce", (ONE.clone(), 0), (ONE.clone(), 1)),
    ]
    endings = [
        outcome(getattr(group, call), *(theirs if dist.get_rank() else ours))
        for call, ours, theirs in calls
    ]
    group.barrier()
    group.destroy()
    return endings


def test_while_tracing_a_mistake_ends_all_ranks() -> None:
    for endings in run_ranks(_run_traced, 2, _mistake_while_traced):
        for kind, text in endings:
            assert kind == "CollectiveError"
            assert " in group." in text
            assert HERE in text
        assert re.search(r"TypeError: tensor .*torch\.Tensor, got list", endings[0][1])
        assert re.search("ValueError: tensor_list .*empty", endings[3][1])
        assert re.search(r"rank 1: sum .*float32 .*\(2,\) .*cpu .*rank 1", endings[4][1])


def _run_traced(scenario: Callable[[], Any]) -> Any:
    return traced(True, scenario)


def _call_everything() -> list[str]:
    group = CollectiveGroup.create()
    tensor, two = torch.ones(1), [torch.ones(1), torch.ones(1)]
    group.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    group.all_gather_multigpu([two], [tensor])
    group.reduce_scatter(tensor, two)
    group.monitored_barrier(5)
    group.broadcast_object(1, 0)
    group.scatter_object([1, 2] if dist.get_rank() == 0 else None)
    group.destroy()
    # The list is limited, and earlier tests on these ranks may have filled it.
    return [f"{record.name} {record.state}" for record in recent_collectives()[-7:]]


def test_calls_are_recorded_while_tracing() -> None:
    expected = [
        "group.all_reduce finished",
        "group.all_reduce.wait finished",
        "group.all_gather_multigpu finished",
        "group.reduce_scatter finished",
        "group.monitored_barrier finished",
        "broadcast finished",
        "scatter_object finished",
    ]
    assert run_ranks(_run_traced, 2, _call_everything) == [expected] * 2


def _miss_rank_2() -> list[str]:
    texts = []
    for is_reduction in (True, False):
        group = CollectiveGroup.create(timeout_s=1)
        if dist.get_rank() != 2:
            tensor = torch.ones(1)
            if is_reduction:
                handle = group.all_reduce(tensor, async_op=True)
                assert handle is not None
                kind, text = outcome(handle.wait)
            else:
                kind, text = outcome(group.monitored_barrier, 0.5)
            assert kind == "CollectiveError"
            texts.append(text)
        dist.barrier()
    return texts


def test_timeouts_name_missing_ranks() -> None:
    rank_0, second, rank_2 = run_ranks(_miss_rank_2, 3)
    assert rank_2 == []
    names = ("group.all_reduce.wait", "group.monitored_barrier")
    for texts in (rank_0, second):
        for text, name in zip(texts, names, strict=True):
            assert re.match(rf"{name}\(\) must .*reached .* 3 ranks", text)
            assert f"in {name} ({HERE}:" in text
            assert "rank 2 has not arrived" in text


def _lose_a_rank() -> str:
    group = CollectiveGroup.create()
    if dist.get_rank() == 1:
        group.destroy()
    dist.barrier()
    kind, _ = outcome(group.all_reduce, torch.ones(1))
    # Stay alive until the other rank has timed out.
    dist.barrier()
    return kind


def test_destroying_a_group_early_fails_the_other_members() -> None:
    assert run_ranks(_lose_a_rank, 2) == ["CollectiveError", "RuntimeError"]
