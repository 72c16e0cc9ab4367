"""Groups as objects: their members and lifetime."""

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls import assert_outcomes, group_of_one, outcome
from group_calls import get_members
from ranks import on_ranks, run_ranks

from stepwrap.collectives import CollectiveGroup


def _every_call(group: CollectiveGroup) -> dict[str, tuple[str, str]]:
    """Return the outcome of each call of the group."""
    tensor, two = torch.ones(1), [torch.ones(1), torch.ones(1)]
    arguments: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("send", "isend", "broadcast", "reduce"), (tensor, 1)),
        **dict.fromkeys(("recv", "irecv", "all_reduce", "gather", "scatter"), (tensor,)),
        "all_gather": (two, tensor),
        "reduce_scatter": (tensor, two),
        "all_to_all": (two, two),
        "barrier": (),
        "monitored_barrier": (1,),
        "broadcast_multigpu": (two, 1),
        "all_reduce_multigpu": (two,),
        "reduce_multigpu": (two, 1),
        "all_gather_multigpu": ([two], [tensor]),
        "broadcast_object": (1, 1),
        "all_gather_object": (1,),
        "gather_object": (1,),
        "scatter_object": ([1, 2],),
    }
    calls = {name for name in vars(CollectiveGroup) if not name.startswith("_")}
    assert set(arguments) == calls - {"create", "size", "destroy"}
    return {
        name: outcome(getattr(group, name), *call_args) for name, call_args in arguments.items()
    }


def _live_and_die() -> tuple[Any, ...]:
    group, is_member = get_members([3, 1])
    before = group.current_rank, group.size(), group.destroyed, group.group is not None
    endings = {} if is_member else _every_call(group)
    group.destroy()
    group.destroy()
    assert group.destroyed
    assert group.group is None
    assert outcome(group.size)[0] == "RuntimeError"
    return before, endings, _every_call(group)


def test_members_are_numbered_and_others_are_refused() -> None:
    for rank, (before, endings, afterwards) in enumerate(run_ranks(_live_and_die, 4)):
        group_rank = {1: 0, 3: 1}.get(rank)
        is_member = group_rank is not None
        assert before == (group_rank, 2 if is_member else -1, False, is_member)
        for kind, text in endings.values():
            assert kind == "RuntimeError"
            assert "must be a member" in text
        for kind, text in afterwards.values():
            assert kind == "RuntimeError"
            assert "it has been destroyed" in text


@on_ranks(3)
def test_groups_of_torch_are_taken() -> None:
    world = CollectiveGroup(None, dist.get_rank())
    torch_group = dist.new_group([1, 2])
    group_rank = None if dist.get_rank() == 0 else dist.get_rank() - 1
    wrapped = CollectiveGroup(torch_group, group_rank)
    assert (world.size(), wrapped.size()) == (3, -1 if group_rank is None else 2)
    kind, text = outcome(CollectiveGroup, None, dist.get_rank() + 1)
    assert kind == "ValueError"
    assert f"rank in the group, {dist.get_rank()}, got {dist.get_rank() + 1}" in text
    value = torch.ones(1)
    world.destroy()
    # `destroy` must not end the default group, which the object did not create.
    dist.all_reduce(value)
    assert value.item() == 3
    wrapped.destroy()


@on_ranks(2)
def test_a_group_outlives_its_object() -> None:
    group = CollectiveGroup.create()
    torchs = group.group
    del group
    gc.collect()
    value = torch.ones(1)
    dist.all_reduce(value, group=torchs)
    assert value.item() == 2
    CollectiveGroup(torchs, dist.get_rank()).destroy()
    # `destroy` ends only groups made by `create`, also through another object.
    assert outcome(dist.get_rank, torchs)[0] == "ValueError"


def _outlive_the_default_group() -> list[tuple[str, str]]:
    with group_of_one("gloo"):
        group = CollectiveGroup.create()
        group.all_reduce(torch.ones(1))
    endings = [outcome(group.all_reduce, torch.ones(1)), outcome(group.size)]
    group.destroy()
    return [*endings, outcome(CollectiveGroup.create)]


def test_a_group_ends_with_the_default_group() -> None:
    (endings,) = run_ranks(_outlive_the_default_group, 1, init=False)
    assert [kind for kind, _ in endings] == ["RuntimeError"] * 3
    assert re.search("default process group.*destroyed", endings[0][1])
    assert "needs a default process group" in endings[2][1]


MISTAKES: list[tuple[Any, dict[str, Any], str, str]] = [
    ([0, 0], {}, "ValueError", "ranks must be one or more different ranks from 0 to 1, got [0, 0]"),
    ([0, 2], {}, "ValueError", "ranks must be one or more different ranks from 0 to 1, got [0, 2]"),
    ([], {}, "ValueError", "one or more different ranks from 0 to 1, got []"),
    (1, {}, "TypeError", "'int' object is not iterable"),
    (None, {"timeout_s": 0}, "ValueError", "timeout_s must be positive, got 0"),
    ([1], {}, "ValueError", "must get the same ranks, timeout_s and backend on all ranks, got "),
    (None, {"timeout_s": 5}, "ValueError", "on rank 0 and ([0, 1], 5, None) on rank 1"),
]


def _create_wrongly() -> list[tuple[str, str]]:
    endings = []
    for ranks, options, _, _ in MISTAKES:
        if dist.get_rank() == 0:
            ranks, options = None, {}
        endings.append(outcome(CollectiveGroup.create, ranks, **options))
    return endings


def test_ranks_must_create_the_same_group() -> None:
    rank_0, second = run_ranks(_create_wrongly, 2)
    assert rank_0 == second
    assert_outcomes(rank_0, [tuple(mistake[2:]) for mistake in MISTAKES])


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_backends_are_passed_on(backend: str | None) -> None:
    assert run_ranks(_sum_over, 2, backend) == [3.0, 3.0]


def _sum_over(backend: str | None) -> float:
    group = CollectiveGroup.create(timeout_s=20, backend=backend)
    value = torch.tensor(float(dist.get_rank() + 1))
    group.all_reduce(value)
    group.destroy()
    return value.item()
