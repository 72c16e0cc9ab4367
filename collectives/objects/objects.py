"""Collectives on picklable objects; large ones are sent without extra copies."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, attempt, get_text, name_ranks
from ..process.ranks import comm_device, live_world_size, members, place_in_group
from ..trace.calling import calling
from ..trace.headers import INLINE_BYTES, exchange_headers, gather_numbers, raise_disagreement
from .serialize import PackedObject, pack, unpack
from .shared_memory import host, map_pieces, share_pieces

T = TypeVar("T")

# From this size on, mapping shared memory is faster than sending between two processes.
_SHARED_FROM = 2**20
_DONE, _NOT_UNPICKLED, _NOT_MAPPED = range(3)
_NOTHING = PackedObject([])


def broadcast(obj: T, src: int = 0, group: Group = None) -> T:
    """Return the object of global rank ``src`` on every rank; every rank must call this.

    The source gets its own object back and the others a copy; their own ``obj`` is ignored.
    Tensors inside arrive on the CPU. Without a process group ``obj`` is returned.

    Raises:
        ValueError: ``src`` is not a rank of the group.
        CollectiveError: on every rank, if the object cannot be pickled on the source or unpickled
            on some rank; or if a rank does not take part.
    """
    place_in_group(src, group)
    if live_world_size(group) == 1:
        return obj
    is_source = dist.get_rank() == src
    receivers = [rank for rank in members(group) if rank != src]
    received = _collect("broadcast", obj, group, receivers, f"from rank {src}", is_sent=is_source)
    copy: T = obj if is_source else received[src]
    return copy


def all_gather_object(obj: T, group: Group = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; every rank must call this.

    All are copies, including the caller's; tensors inside arrive on the CPU. In a group of one
    rank, or without a group, the list contains the object itself.

    Raises:
        CollectiveError: on every rank, if some rank's object cannot be pickled or unpickled; or if
            a rank does not take part.
    """
    if live_world_size(group) == 1:
        return [obj]
    return list(_collect("all_gather_object", obj, group, members(group)).values())


def gather_object(obj: T, dst: int = 0, group: Group = None) -> list[T] | None:
    """Return the objects of all ranks, in rank order, on global rank ``dst``, None on the others.

    Otherwise like ``all_gather_object``; every rank must call this.

    Raises:
        ValueError: ``dst`` is not a rank of the group.
        CollectiveError: as in ``all_gather_object``.
    """
    place_in_group(dst, group, "dst")
    if live_world_size(group) == 1:
        return [obj]
    received = _collect("gather_object", obj, group, [dst], f"to rank {dst}")
    return list(received.values()) if dist.get_rank() == dst else None


def scatter_object(objs: Sequence[T] | None, src: int, group: dist.ProcessGroup) -> T:
    """Return this rank's object from the list on global rank ``src``; every rank must call this."""
    position, device, ranks = place_in_group(src, group), comm_device(group), members(group)
    is_source = dist.get_rank() == src
    packed_objects, problem = attempt(lambda: _pack_each(objs, src, ranks) if is_source else {})
    plan = {
        rank: (packed.size, packed.is_foreign) for rank, packed in (packed_objects or {}).items()
    }
    with calling("scatter_object", group, None, f"from rank {src}", has_headers=True) as call:
        failed_to = "scatter its objects"
        plan = _exchange(call, pack(plan) if is_source else None, problem, ranks, failed_to)[src]
        memory: dict[int, memoryview] = {}
        if is_source:
            sent = {
                rank: _get_bytes(packed).to(device)
                for rank, packed in (packed_objects or {}).items()
            }
            _wait_for([dist.isend(data, rank, group) for rank, data in sent.items()])
        else:
            buffer = torch.empty(plan[dist.get_rank()][0], dtype=torch.uint8, device=device)
            dist.recv(buffer, src, group)
            memory[src] = buffer.cpu().numpy().data
        received = _unpack(call, memory, any(is_foreign for _, is_foreign in plan.values()))
    received_object: T = objs[position] if is_source and objs is not None else received[src]
    return received_object


def pad_to_largest_tensor(
    tensor: torch.Tensor, group: Group = None
) -> tuple[list[int], torch.Tensor]:
    """Return all ranks' element counts, and the tensor padded with zeros to the largest of them.

    Every rank must call this. The tensor itself is returned if it needs no padding.

    Args:
        tensor: a tensor of shape ``(n,)``; ``n`` may differ between ranks.

    Raises:
        ValueError: on every rank, if some rank's tensor does not have one dimension.
    """
    counts = all_gather_object(tensor.numel() if tensor.dim() == 1 else None, group)
    sizes = [count for count in counts if count is not None]
    if len(sizes) < len(counts):
        wrong = [rank for rank, count in zip(members(group), counts, strict=True) if count is None]
        raise ValueError(
            f"tensor must have one dimension on all ranks, but has another number on "
            f"{name_ranks(wrong)}; its shape on this rank is {tuple(tensor.shape)}"
        )
    missing = max(sizes) - tensor.numel()
    return sizes, torch.cat([tensor, tensor.new_zeros(missing)]) if missing else tensor


def sync_random_seed(group: Group = None) -> int:
    """Return the same new seed in [0, 2**31) on all ranks; every rank must call this.

    The group's first rank draws it from the operating system. It does not depend on earlier
    seeding, and it advances no random generator of Python, NumPy or torch.
    """
    return broadcast(secrets.randbelow(2**31), members(group)[0], group)


def _collect(
    name: str,
    value: object,
    group: Group,
    receivers: Sequence[int],
    detail: str = "",
    *,
    is_sent: bool = True,
) -> dict[int, Any]:
    """Send ``value`` to the receivers; return what this rank received, by global rank."""

    def describe() -> str | Iterable[object]:
        return value.keys() if isinstance(value, Mapping) else type(value).__name__

    # Pickles outside of `calling`, because this runs the user's code, which may call collectives.
    packed, problem = attempt(lambda: pack(value) if is_sent else None)
    with calling(name, group, describe, detail, has_headers=True) as call:
        return _exchange(call, packed, problem, receivers)


def _pack_each(objs: object, src: int, ranks: Sequence[int]) -> dict[int, PackedObject]:
    if not isinstance(objs, list | tuple):
        raise TypeError(f"objs must be a list on rank {src}, got {type(objs).__name__}")
    if len(objs) != len(ranks):
        raise ValueError(
            f"objs must have {len(ranks)} objects, one for each of the ranks {ranks}, "
            f"got {len(objs)}"
        )
    return {
        rank: pack(sent_object)
        for rank, sent_object in zip(ranks, objs, strict=True)
        if rank != src
    }


def _exchange(
    call: Call,
    packed: PackedObject | None,
    problem: Exception | None,
    receivers: Sequence[int],
    failed_to: str = "pickle its object",
) -> dict[int, Any]:
    """Return the objects of all ranks by the sender's global rank; {} if this rank receives none.

    Every rank must call this.

    Raises:
        CollectiveError: on every rank, if one has a problem or cannot unpickle.
    """
    sent, ranks = packed or _NOTHING, members(call.group)
    headers = exchange_headers(
        call,
        inline=sent.pieces,
        is_foreign=sent.is_foreign,
        host=host(),
        problem=problem,
        failed_to=failed_to,
    )
    by_rank = dict(zip(ranks, headers, strict=True))
    may_fail = any(header.is_foreign for header in headers)
    sizes = {rank: header.size for rank, header in by_rank.items() if header.size > INLINE_BYTES}
    memory = {rank: header.inline for rank, header in by_rank.items() if header.size}
    if sizes and max(sizes.values()) >= _SHARED_FROM and len({h.host for h in headers}) == 1:
        objects = _share(call, sent, sizes, memory, receivers)
        if objects is not None:
            return objects
    if sizes:
        memory |= _transmit(call.group, sent, sizes, receivers)
    return _unpack(call, memory if dist.get_rank() in receivers else {}, may_fail)


def _share(
    call: Call,
    packed: PackedObject,
    sizes: Mapping[int, int],
    memory: Mapping[int, memoryview],
    receivers: Sequence[int],
) -> dict[int, Any] | None:
    """Return the objects through shared memory; None on all ranks if it fails on one of them."""
    rank, group = dist.get_rank(), call.group
    # The memory stays open until all ranks agree on the outcome, because they may still map it.
    with share_pieces(packed.pieces if rank in sizes else []) as own_place:
        addresses = dict(zip(members(group), gather_numbers(own_place, group), strict=True))
        if any(address[-1] for address in addresses.values()):
            return None
        if rank not in receivers:
            return _agree_on(call, _DONE, {})
        try:
            shared = {sender: map_pieces(addresses[sender], size) for sender, size in sizes.items()}
        except OSError:
            return _agree_on(call, _NOT_MAPPED, {})
        objects, problem = attempt(lambda: _unpack_each({**memory, **shared}))
        return _agree_on(call, _NOT_UNPICKLED if problem else _DONE, objects, problem)


def _transmit(
    group: Group, packed: PackedObject, sizes: Mapping[int, int], receivers: Sequence[int]
) -> dict[int, memoryview]:
    """Send the large objects, each in a message of its exact size; return them by global rank."""
    rank, device = dist.get_rank(), comm_device(group)
    receives = rank in receivers
    buffers: dict[int, torch.Tensor] = {}
    works: list[dist.Work | None] = []
    for sender, size in sizes.items():
        if not (sender == rank or receives):
            continue
        buffers[sender] = (
            _get_bytes(packed).to(device)
            if sender == rank
            else torch.empty(size, dtype=torch.uint8, device=device)
        )
        if len(receivers) > 1:
            works.append(dist.broadcast(buffers[sender], sender, group, async_op=True))
        elif sender != rank:
            works.append(dist.irecv(buffers[sender], sender, group))
        elif not receives:
            works.append(dist.isend(buffers[sender], receivers[0], group))
    _wait_for(works)
    return {r: data.cpu().numpy().data for r, data in buffers.items()} if receives else {}


def _unpack(call: Call, memory: Mapping[int, memoryview], may_fail: bool) -> dict[int, Any]:
    """Return the objects; if unpickling ``may_fail``, all ranks agree on the outcome."""
    objects, problem = attempt(lambda: _unpack_each(memory))
    if may_fail:
        _agree_on(call, _NOT_UNPICKLED if problem else _DONE, objects, problem)
    elif problem is not None:
        raise CollectiveError(
            f"{call.name}(): rank {dist.get_rank()} cannot unpickle what it received: "
            f"{get_text(problem)}"
        ) from problem
    return objects or {}


def _unpack_each(memory: Mapping[int, memoryview]) -> dict[int, Any]:
    return {rank: unpack(memory_view) for rank, memory_view in memory.items()}


def _agree_on(
    call: Call, outcome: int, objects: dict[int, Any] | None, problem: Exception | None = None
) -> dict[int, Any] | None:
    """Return the objects if all ranks succeeded, None if one could not map memory.

    Every rank must call this.

    Raises:
        CollectiveError: on every rank, if one could not unpickle.
    """
    worst = torch.tensor(outcome, device=comm_device(call.group))
    dist.all_reduce(worst, dist.ReduceOp.MAX, call.group)
    if worst == _NOT_UNPICKLED:
        raise_disagreement(call, problem, "unpickle what it received")
    return objects if worst == _DONE else None


def _get_bytes(packed: PackedObject) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(packed.pieces), dtype=torch.uint8)


def _wait_for(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
