"""Objects among the ranks of a group."""

import re
from typing import Any

import torch
import torch.distributed as dist
from calls import assert_outcomes, outcome
from group_calls import get_members
from ranks import run_ranks

from stepwrap.collectives import CollectiveGroup


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def _refuse() -> None:
    raise ImportError("not here")


class Unloadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _exchange_objects(ranks: list[int]) -> None:
    group, is_member = get_members(ranks)
    if not is_member:
        return
    rank, last_rank = dist.get_rank(), ranks[-1]
    assert group.broadcast_object({"rank": rank}, last_rank) == {"rank": last_rank}
    assert group.all_gather_object(rank) == ranks
    assert group.gather_object(rank, last_rank) == (ranks if rank == last_rank else None)
    for size in (1, 400_000):
        objs = [{"rank": r, "values": torch.full((size,), float(r))} for r in ranks]
        received = group.scatter_object(objs if rank == last_rank else None, last_rank)
        assert received["rank"] == rank
        assert torch.equal(received["values"], torch.full((size,), float(rank)))
        # The source gets its own object, other ranks get a copy.
        received["values"].add_(1)
        assert (received is objs[-1]) == (rank == last_rank)
    group.destroy()


def test_objects_go_to_the_members() -> None:
    run_ranks(_exchange_objects, 4, [1, 3])
    run_ranks(_exchange_objects, 3, [0, 1, 2])


def _fail_to_scatter() -> list[tuple[str, str]]:
    group = CollectiveGroup.create()
    is_source = dist.get_rank() == 1
    endings = [
        outcome(group.scatter_object, objs if is_source else None, 1)
        for objs in ([1], None, [Unpicklable(), 1], [Unloadable(), 1])
    ]
    assert group.scatter_object([4, 5] if is_source else None, 1) == 4 + dist.get_rank()
    endings.append(outcome(group.scatter_object, [1, 2], 2))
    group.destroy()
    return endings


def test_objects_that_cannot_be_scattered_raise_on_all_ranks() -> None:
    rank_0, second = run_ranks(_fail_to_scatter, 2)
    phrases = [
        "rank 1 cannot scatter its objects: ValueError: objs must have 2 objects, one for each of "
        "the ranks [0, 1], got 1",
        "rank 1 cannot scatter its objects: TypeError: objs must be a list on rank 1, got NoneType",
        "rank 1 cannot scatter its objects: RuntimeError: not me",
        "rank 0 cannot unpickle what it received: ImportError: not here",
    ]
    assert rank_0 == second
    assert_outcomes(rank_0[:-1], [("CollectiveError", phrase) for phrase in phrases])
    assert rank_0[-1][0] == "ValueError"
    assert re.search(r"src must .*\[0, 1\], got 2$", rank_0[-1][1])
