"""Tensors across ranks, in every dtype and layout, from any device over any backend."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from ..errors import Call
from ..objects.agree import raise_together
from ..process.ranks import comm_device, live_world_size, members, place_in_group
from ..trace.calling import calling
from ..transport.first_message import digest, raise_disagreement
from .layout import checked_tensor, checking, describe_tensor
from .memory import start_all_gather
from .operations import Reduction, as_bytes, as_sent, checked_op

# Every rank of one job has the same torch, so the same place in this list.
_DTYPES: Final = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
# The first message says which call this is and, in 19 numbers, what is sent and on what device; the
# data follows in it where it is small. It is as long as that of the object collectives, so that a
# rank in one of these is found out.
_DIMS: Final = 15
_LAYOUT: Final = struct.Struct(f"<8sq{3 + _DIMS}q")
_MESSAGE_BYTES: Final = 1024
_HAS_PROBLEM: Final = -1


def all_reduce(data: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce a tensor over the ranks in place; every rank must call this.

    Shapes and dtypes must agree, which is not checked. Sums of booleans are True where any is. The
    mean keeps the dtype: that of integers is rounded to the nearest one, halves to the even one,
    with one warning when that loses something.

    Args:
        op: "sum", "product", "min", "max", "band", "bor", "bxor" or "mean". Complex numbers have
            only sum, product and mean; floating-point numbers have no bitwise operations.

    Raises:
        TypeError, ValueError: no dense tensor with values, or an operation that is unknown or not
            defined for the dtype; on that rank only, and the others end at the timeout with an
            error that names it. While tracing it is a CollectiveError on every rank at once.
        CollectiveError: a rank does not take part.
    """
    world_size = live_world_size(group)
    with checking("all_reduce", group, lambda: f"{op} of {describe_tensor(data)}"):
        target = checked_tensor("data", data).detach()
        op = checked_op(op, data.dtype)
        if world_size == 1:
            return
        reduction = Reduction(target, op, group)
    with calling("all_reduce", group, lambda: f"{op} of {describe_tensor(data)}"):
        reduction.run()
    reduced = reduction.result()
    if reduced is not target:
        target.copy_(reduced)


def broadcast(data: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite a tensor with that of rank `src` in place; every rank must call this.

    Shapes and dtypes must agree, which is not checked.

    Args:
        src: a global rank, also for a sub-group.

    Raises:
        TypeError, ValueError: no dense tensor with values, or `src` is no rank of the group; on
            that rank only, and the others end at the timeout with an error that names it. While
            tracing it is a CollectiveError on every rank at once.
        CollectiveError: a rank does not take part.
    """
    world_size = live_world_size(group)
    with checking("dist.broadcast", group, lambda: f"{describe_tensor(data)} from rank {src}"):
        target = checked_tensor("data", data).detach()
        place_in_group(src, group)
        if world_size == 1:
            return
        sent = as_sent(target, comm_device(group, prefer=target.device))
        memory = as_bytes(sent)
    with calling("dist.broadcast", group, lambda: f"{describe_tensor(data)} from rank {src}"):
        dist.broadcast(memory, src, group)
    if sent is not target and dist.get_rank() != src:
        target.copy_(sent)


def all_gather(data: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on every rank; every rank must call this.

    All are detached copies on the device of `data`, the own one too; with one process the list
    holds `data` itself.

    Raises:
        ValueError: on every rank, when shapes or dtypes differ, or some rank's data is sparse,
            meta, nested or quantized.
        TypeError: on every rank, when some rank's data is no tensor.
        CollectiveError: a rank does not take part.
    """
    if live_world_size(group) == 1:
        return [checked_tensor("data", data)]
    own = _prepare(data, group)
    with calling("all_gather", group, lambda: describe_tensor(data), meets=True) as call:
        parts = _meet(call, own)
        if parts is None:
            parts = _gather_large(own.memory, group)
    return [_restore(part, data) for part in parts]


def gather(
    data: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on rank `dst`; every rank must call this.

    The other ranks get an empty list. Otherwise like `all_gather`.

    Args:
        dst: a global rank, also for a sub-group.

    Raises:
        ValueError: on every rank, when shapes or dtypes or the ranks' `dst` differ, `dst` is no
            rank of the group, or some rank's data is sparse, meta, nested or quantized.
        TypeError: on every rank, when some rank's data is no tensor.
        CollectiveError: a rank does not take part.
    """
    world_size = live_world_size(group)
    if world_size == 1:
        place_in_group(dst, group, "dst")
        return [checked_tensor("data", data)]
    own = _prepare(data, group, dst)
    with calling(
        "gather", group, lambda: f"{describe_tensor(data)} to rank {dst}", meets=True
    ) as call:
        parts = _meet(call, own)
        is_destination = dist.get_rank() == dst
        if parts is None:
            count = world_size if is_destination else 0
            parts = [torch.empty_like(own.memory) for _ in range(count)]
            dist.gather(own.memory, parts if is_destination else None, dst, group)
    return [_restore(part, data) for part in parts] if is_destination else []


def _gather_large(sent: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    parts = [torch.empty_like(sent) for _ in members(group)]
    for work in start_all_gather(parts, sent, group):
        work.wait()
    return parts


@dataclass
class _Own:
    """What this rank sends.

    Attributes:
        numbers: what must be the same on all ranks.
        memory: the data as bytes, on the device on which they travel when they are large.
        problem: why there are none.
    """

    numbers: list[int]
    memory: torch.Tensor
    problem: Exception | None = None

    @property
    def is_small(self) -> bool:
        """Whether the data fits into the first message."""
        return _LAYOUT.size + self.memory.numel() <= _MESSAGE_BYTES


def _prepare(data: torch.Tensor, group: dist.ProcessGroup | None, dst: int | None = None) -> _Own:
    try:
        checked_tensor("data", data)
        if dst is not None:
            place_in_group(dst, group, "dst")
        memory = as_bytes(as_sent(data, comm_device(group, prefer=data.device)))
        return _Own(_numbers(data, dst or 0), memory)
    # Whatever torch raises, the other ranks wait to hear of it.
    except Exception as error:
        return _Own([_HAS_PROBLEM] + [0] * (2 + _DIMS), torch.empty(0, dtype=torch.uint8), error)


def _meet(call: Call, own: _Own) -> list[torch.Tensor] | None:
    """Return the bytes of all ranks where they are few.

    The message travels where those of all ranks do, wherever this rank's data is.
    """
    device = comm_device(call.group)
    travels_elsewhere = own.memory.device.type != device.type
    header = _LAYOUT.pack(digest(call.name)[:8], travels_elsewhere, *own.numbers)
    # Made by Python, which is several times faster here than a chain of small tensor operations.
    message = torch.frombuffer(bytearray(header.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    message = message.to(device)
    end = _LAYOUT.size + own.memory.numel()
    if own.is_small:
        message[_LAYOUT.size : end] = own.memory
    rows = torch.empty(
        live_world_size(call.group), _MESSAGE_BYTES, dtype=torch.uint8, device=device
    )
    messages = list(rows.unbind())
    dist.all_gather(messages, message, call.group)
    headers = [row.tobytes() for row in rows[:, : _LAYOUT.size].cpu().numpy()]
    if own.problem is not None or any(other != header for other in headers):
        _compare(call, own, [_LAYOUT.unpack(other) for other in headers])
    return [one[_LAYOUT.size : end].clone() for one in messages] if own.is_small else None


def _compare(call: Call, own: _Own, headers: Sequence[Sequence[Any]]) -> None:
    """Raise on every rank what is wrong, or let the data travel where that of all ranks can."""
    if len({header[0] for header in headers}) > 1:
        raise_disagreement(call)
    numbers = [header[2:] for header in headers]
    if any(one[0] == _HAS_PROBLEM for one in numbers):
        raise_together(own.problem, call.group, f"{call.name}() ")
    if any(one != numbers[0] for one in numbers):
        _raise_difference(call, numbers)
    own.memory = own.memory.to(comm_device(call.group))


def _numbers(data: torch.Tensor, dst: int) -> list[int]:
    """Return what must be the same on all ranks; dims after the 15th only as their product."""
    dims = list(data.shape)
    if len(dims) > _DIMS:
        dims[_DIMS - 1 :] = [math.prod(dims[_DIMS - 1 :])]
    padding = [0] * (_DIMS - len(dims))
    return [_DTYPES.index(data.dtype), data.dim(), dst, *dims, *padding]


def _raise_difference(call: Call, numbers: Sequence[Sequence[int]]) -> NoReturn:
    """Raise on every rank what differs between the ranks."""
    texts: dict[str, list[int]] = {}
    for rank, one in zip(members(call.group), numbers, strict=True):
        texts.setdefault(_describe_numbers(one), []).append(rank)
    got = "; ".join(f"{text} on rank {', '.join(map(str, on))}" for text, on in texts.items())
    raise ValueError(f"{call.name}() must get the same shape and dtype on all ranks, got {got}")


def _describe_numbers(numbers: Sequence[int]) -> str:
    code, dim, dst, *dims = numbers
    to = f" for rank {dst}" if dst else ""
    return f"{_DTYPES[code]} of shape {tuple(dims[:dim])}{to}"


def _restore(part: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return part.view(data.dtype).view(data.shape).to(data.device)
