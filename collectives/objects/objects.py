"""Python objects across ranks: any picklable object, large ones without needless copies."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import name_ranks
from ..process.ranks import live_world_size, members, place_in_group
from ..trace.calling import calling
from ..transport.serialize import Parcel, pack
from .exchange import exchange

T = TypeVar("T")


def broadcast(obj: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the object of global rank `src` on every rank; every rank must call this.

    The source gets its own object back, the others a copy; what they pass is ignored. Tensors
    inside arrive on the CPU. Without a process group it is the identity.

    Raises:
        ValueError: `src` is no rank of the group.
        CollectiveError: on every rank, when the object cannot be pickled on the source or
            unpickled on some rank; or when a rank does not take part.
    """
    place_in_group(src, group)
    if live_world_size(group) == 1:
        return obj
    is_source = dist.get_rank() == src
    # Outside of the call: pickling runs the user's code.
    parcel, problem = _try_to_pack(obj) if is_source else (Parcel(), None)
    others = [rank for rank in members(group) if rank != src]
    with calling("broadcast", group, _describe(obj), f"from rank {src}", meets=True) as call:
        received = exchange(call, parcel, problem, others)
    copy: T = obj if is_source else received[src]
    return copy


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; every rank must call this.

    All are copies, the own one too; tensors inside arrive on the CPU. Without a process group the
    list holds the object itself.

    Raises:
        CollectiveError: on every rank, when some rank's object cannot be pickled or unpickled; or
            when a rank does not take part.
    """
    if live_world_size(group) == 1:
        return [obj]
    parcel, problem = _try_to_pack(obj)
    with calling("all_gather_object", group, _describe(obj), meets=True) as call:
        return list(exchange(call, parcel, problem, members(group)).values())


def gather_object(obj: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return the objects of all ranks, in rank order, on global rank `dst`, None on the others.

    Every rank must call this. All are copies, the own one too; tensors inside arrive on the CPU.
    Without a process group the list holds the object itself.

    Raises:
        ValueError: `dst` is no rank of the group.
        CollectiveError: as for `all_gather_object`, on every rank.
    """
    place_in_group(dst, group, "dst")
    if live_world_size(group) == 1:
        return [obj]
    parcel, problem = _try_to_pack(obj)
    with calling("gather_object", group, _describe(obj), f"to rank {dst}", meets=True) as call:
        received = exchange(call, parcel, problem, [dst])
    return list(received.values()) if dist.get_rank() == dst else None


def pad_to_largest_tensor(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[list[int], torch.Tensor]:
    """Return all ranks' element counts and the tensor (n,), with zeros up to the largest of them.

    Every rank must call this. A tensor that is as long already is returned itself, as it is
    without a process group.

    Raises:
        ValueError: on every rank, when some rank's tensor has not one dimension.
    """
    counts = all_gather_object(tensor.numel() if tensor.dim() == 1 else None, group)
    sizes = [count for count in counts if count is not None]
    if len(sizes) < len(counts):
        wrong = [rank for rank, count in zip(members(group), counts, strict=True) if count is None]
        raise ValueError(
            f"tensor must have one dimension, which it has not on {name_ranks(wrong)}; here its "
            f"shape is {tuple(tensor.shape)}"
        )
    missing = max(sizes) - tensor.numel()
    return sizes, torch.cat([tensor, tensor.new_zeros(missing)]) if missing else tensor


def _try_to_pack(obj: object) -> tuple[Parcel, Exception | None]:
    """Return the parcel, or why there is none: whatever it is, the other ranks are waiting."""
    try:
        return pack(obj), None
    except Exception as error:
        return Parcel(), error


def _describe(obj: object) -> Callable[[], str | Iterable[object]]:
    return lambda: obj.keys() if isinstance(obj, Mapping) else type(obj).__name__
