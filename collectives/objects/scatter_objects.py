"""A different object to every rank."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, text_of
from ..process.ranks import comm_device, members, place_in_group
from ..trace.calling import calling
from ..transport.first_message import meet, raise_disagreement
from ..transport.serialize import Parcel, pack, unpack
from .exchange import bytes_of

T = TypeVar("T")


def scatter_object(objs: Sequence[T] | None, src: int, group: dist.ProcessGroup) -> T:
    """Return this rank's object of the list on global rank `src`; every rank must call this.

    Each object goes to its rank alone. The source gets its own object back, the others a copy.

    Raises:
        ValueError: `src` is no rank of the group.
        CollectiveError: on every rank, when the list has another length than the group, an object
            cannot be pickled on the source or unpickled on its rank; or when a rank does not take
            part.
    """
    place = place_in_group(src, group)
    is_source = dist.get_rank() == src
    # Outside of the call: pickling runs the user's code.
    parcels, problem = _try_to_pack(objs, src, group) if is_source else ({}, None)
    with calling("scatter_object", group, None, f"from rank {src}", meets=True) as call:
        meet(call, problem=problem, failed_to="scatter its objects")
        copy = _exchange(call, parcels, src)
    if is_source:
        assert objs is not None
        return objs[place]
    return copy  # type: ignore[no-any-return]


def _try_to_pack(
    objs: object, src: int, group: dist.ProcessGroup
) -> tuple[dict[int, Parcel], Exception | None]:
    """Return the parcels by global rank, or why there are none: the others are waiting."""
    ranks = members(group)
    try:
        if not isinstance(objs, list | tuple):
            raise TypeError(f"objs must be a list on rank {src}, got {type(objs).__name__}")
        if len(objs) != len(ranks):
            raise ValueError(
                f"objs must have {len(ranks)} objects, one for each of the ranks {ranks}, "
                f"got {len(objs)}"
            )
        pairs = zip(ranks, objs, strict=True)
        return {rank: pack(obj) for rank, obj in pairs if rank != src}, None
    except Exception as error:
        return {}, error


def _exchange(call: Call, parcels: Mapping[int, Parcel], src: int) -> Any:
    """Return this rank's object; None on the source."""
    group, device = call.group, comm_device(call.group)
    ranks = members(group)
    is_foreign = any(parcel.is_foreign for parcel in parcels.values())
    sizes = [parcels[rank].size if rank in parcels else 0 for rank in ranks]
    plan = torch.tensor([*sizes, is_foreign], device=device)
    dist.broadcast(plan, src, group)
    *sizes, may_fail = plan.tolist()
    obj, problem = None, None
    if dist.get_rank() == src:
        messages = [
            dist.isend(bytes_of(parcel).to(device), rank, group) for rank, parcel in parcels.items()
        ]
        for message in messages:
            assert message is not None
            message.wait()
    else:
        size = sizes[ranks.index(dist.get_rank())]
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(buffer, src, group)
        try:
            obj = unpack(buffer.cpu().numpy().data)
        # A class that cannot be imported on this rank only; the others wait for its answer.
        except Exception as error:
            problem = error
    if may_fail:
        _agree(call, problem)
    elif problem:
        raise CollectiveError(
            f"{call.name}(): rank {dist.get_rank()} cannot unpickle what it received: "
            f"{text_of(problem)}"
        ) from problem
    return obj


def _agree(call: Call, problem: Exception | None) -> None:
    """Raise on every rank what one of them could not unpickle."""
    failed = torch.tensor(int(problem is not None), device=comm_device(call.group))
    dist.all_reduce(failed, dist.ReduceOp.MAX, call.group)
    if failed:
        raise_disagreement(call, problem, "unpickle what it received")
