"""Making a group out of some of the ranks."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from ..objects.agree import raise_together
from ..objects.objects import all_gather_object
from ..process.ranks import distributed_available, members
from ..tensors.barrier import start_barrier
from ..trace.calling import calling


def new_group(
    ranks: Iterable[int] | None, timeout_s: float, backend: str | None
) -> tuple[dist.ProcessGroup | None, int | None]:
    """Return the new group and this process's place in it; None and None when it is no member.

    Every rank of the default group must call this.

    Raises:
        RuntimeError: there is no default group.
        TypeError, ValueError: on every rank, when the arguments of one are wrong or differ.
    """
    if not distributed_available():
        raise RuntimeError(
            "a group needs a default process group: call torch.distributed.init_process_group() "
            "or make a World first"
        )
    chosen, problem = _try_to_choose(ranks, timeout_s)
    raise_together(problem, what="CollectiveGroup.create() ")
    asked = all_gather_object((chosen, timeout_s, backend))
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise ValueError(
                "CollectiveGroup.create() must get the same ranks, timeout_s and backend on all "
                f"ranks, got {asked[0]} on rank 0 and {other} on rank {rank}"
            )
    with calling("CollectiveGroup.create"):
        group = dist.new_group(chosen, timedelta(seconds=timeout_s), backend)
        if dist.get_rank() not in chosen:
            return None, None
        # Who has it may destroy it, which must not fail a member that still connects.
        start_barrier(group).wait()
    return group, chosen.index(dist.get_rank())


def _try_to_choose(
    ranks: Iterable[int] | None, timeout_s: float
) -> tuple[list[int], Exception | None]:
    """Return the sorted ranks, or what is wrong: the other ranks are waiting."""
    every = members()
    try:
        chosen = every if ranks is None else sorted(ranks)
        if not chosen or not set(chosen) <= set(every) or len(set(chosen)) < len(chosen):
            raise ValueError(
                f"ranks must be different ranks of 0 to {len(every) - 1}, at least one, "
                f"got {chosen}"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        return chosen, None
    except Exception as error:
        return [], error
