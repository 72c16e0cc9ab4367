"""Tensors across ranks, in every dtype and layout, from any device over any backend."""

import math
import struct
from collections.abc import Sequence
from typing import Final, NoReturn

import torch
import torch.distributed as dist

from ._call import calling
from ._meeting import digest, raise_disagreement
from ._operations import as_bytes, as_sent, checked_op, reduce_over
from ._story import Call
from .process import comm_device, live_world_size, members, place_in_group

# Every rank of one job has the same torch, so the same place in this list.
_DTYPES: Final = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
# The first message says which call this is and, in 18 numbers, what is sent; the data follows in it
# where it is small. It is as long as that of the object collectives, so that a rank in one of these
# is found out.
_DIMS: Final = 15
_LAYOUT: Final = struct.Struct(f"<8s{3 + _DIMS}q")
_MESSAGE_BYTES: Final = 1024
_LARGE_BYTES: Final = 2**18
_NO_TENSOR: Final = -1


def all_reduce(data: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce a tensor over the ranks in place; every rank must call this.

    Shapes and dtypes must agree, which is not checked. Sums of booleans are True where any is. The
    mean keeps the dtype: that of integers is rounded to the nearest one, halves to the even one,
    with one warning when that loses something.

    Args:
        op: "sum", "product", "min", "max", "band", "bor", "bxor" or "mean". Complex numbers have
            only sum, product and mean; floating-point numbers have no bitwise operations.

    Raises:
        ValueError: the operation is unknown or not defined for the dtype.
        CollectiveError: a rank does not take part.
    """
    target = _checked(data).detach()
    op = checked_op(op, data.dtype)
    if live_world_size(group) == 1:
        return
    with calling("all_reduce", group, lambda: f"{op} of {_describe_tensor(data)}"):
        reduced = reduce_over(target, op, group)
    if reduced is not target:
        target.copy_(reduced)


def broadcast(data: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite a tensor with that of rank `src` in place; every rank must call this.

    Shapes and dtypes must agree, which is not checked.

    Args:
        src: a global rank, also for a sub-group.

    Raises:
        ValueError: `src` is no rank of the group.
        CollectiveError: a rank does not take part.
    """
    target = _checked(data).detach()
    place_in_group(src, group)
    if live_world_size(group) == 1:
        return
    with calling("dist.broadcast", group, lambda: f"{_describe_tensor(data)} from rank {src}"):
        sent = as_sent(target, comm_device(group, prefer=target.device))
        dist.broadcast(as_bytes(sent), src, group)
    if sent is not target and dist.get_rank() != src:
        target.copy_(sent)


def all_gather(data: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on every rank; every rank must call this.

    All are detached copies on the device of `data`, the own one too; with one process the list
    holds `data` itself.

    Raises:
        ValueError: on every rank, when shapes or dtypes differ.
        TypeError: on every rank, when some rank's data is no tensor.
        CollectiveError: a rank does not take part.
    """
    if live_world_size(group) == 1:
        return [_checked(data)]
    with calling("all_gather", group, lambda: _describe_tensor(data), meets=True) as call:
        sent, parts = _meet(call, data)
        if parts is None:
            parts = _gather_large(sent, group)
        return [_restore(part, data) for part in parts]


def gather(
    data: torch.Tensor, dst: int = 0, group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on rank `dst`; every rank must call this.

    The other ranks get an empty list. Otherwise like `all_gather`.

    Args:
        dst: a global rank, also for a sub-group.

    Raises:
        ValueError: `dst` is no rank of the group; on every rank, when shapes or dtypes or the
            ranks' `dst` differ.
        TypeError: on every rank, when some rank's data is no tensor.
        CollectiveError: a rank does not take part.
    """
    place_in_group(dst, group, "dst")
    world_size = live_world_size(group)
    if world_size == 1:
        return [_checked(data)]
    is_destination = dist.get_rank() == dst
    with calling(
        "gather", group, lambda: f"{_describe_tensor(data)} to rank {dst}", meets=True
    ) as call:
        sent, parts = _meet(call, data, dst)
        if parts is None:
            parts = [torch.empty_like(sent) for _ in range(world_size if is_destination else 0)]
            dist.gather(sent, parts if is_destination else None, dst, group)
        return [_restore(part, data) for part in parts] if is_destination else []


def _gather_large(sent: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    ranks = members(group)
    parts = [torch.empty_like(sent) for _ in ranks]
    if sent.device.type != "cpu" or sent.numel() < _LARGE_BYTES:
        dist.all_gather(parts, sent, group)
        return parts
    # gloo's all_gather goes through one more buffer; this is three times as fast for 64 MB.
    parts[ranks.index(dist.get_rank())].copy_(sent)
    works = [
        dist.broadcast(part, rank, group, async_op=True)
        for rank, part in zip(ranks, parts, strict=True)
    ]
    for work in works:
        work.wait()
    return parts


def _checked(data: torch.Tensor) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"data must be a torch.Tensor, got {type(data).__name__}")
    return data


def _describe_tensor(data: object) -> str:
    if not isinstance(data, torch.Tensor):
        return type(data).__name__
    return f"{data.dtype} of shape {tuple(data.shape)}"


def _meet(
    call: Call, data: torch.Tensor, dst: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Return the own data as bytes and, where they are few, those of all ranks."""
    is_tensor = isinstance(data, torch.Tensor)
    device = comm_device(call.group, prefer=data.device if is_tensor else None)
    numbers = _numbers(data, dst) if is_tensor else _absent()
    header = _LAYOUT.pack(digest(call.name)[:8], *numbers)
    # Made by Python, which is several times faster here than a chain of small tensor operations.
    message = torch.frombuffer(bytearray(header.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    message = message.to(device)
    sent = as_bytes(as_sent(data, device)) if is_tensor else message[:0]
    end = _LAYOUT.size + sent.numel()
    is_small = end <= _MESSAGE_BYTES
    if is_small:
        message[_LAYOUT.size : end] = sent
    rows = torch.empty(
        live_world_size(call.group), _MESSAGE_BYTES, dtype=torch.uint8, device=device
    )
    messages = list(rows.unbind())
    dist.all_gather(messages, message, call.group)
    headers = [row.tobytes() for row in rows[:, : _LAYOUT.size].cpu().numpy()]
    if not is_tensor or any(other != header for other in headers):
        if any(other[:8] != header[:8] for other in headers):
            raise_disagreement(call)
        _raise_difference(call, [_LAYOUT.unpack(other)[1:] for other in headers], data)
    return sent, [one[_LAYOUT.size : end].clone() for one in messages] if is_small else None


def _numbers(data: torch.Tensor, dst: int) -> list[int]:
    """Return what must be the same on all ranks; dims after the 15th only as their product."""
    dims = list(data.shape)
    if len(dims) > _DIMS:
        dims[_DIMS - 1 :] = [math.prod(dims[_DIMS - 1 :])]
    padding = [0] * (_DIMS - len(dims))
    return [_DTYPES.index(data.dtype), data.dim(), dst, *dims, *padding]


def _absent() -> list[int]:
    return [_NO_TENSOR] + [0] * (2 + _DIMS)


def _raise_difference(call: Call, headers: Sequence[Sequence[int]], data: object) -> NoReturn:
    """Raise on every rank what differs between the ranks, or which ones have no tensor."""
    texts: dict[str, list[int]] = {}
    for rank, header in zip(members(call.group), headers, strict=True):
        texts.setdefault(_describe_header(header), []).append(rank)
    got = "; ".join(f"{text} on rank {', '.join(map(str, on))}" for text, on in texts.items())
    if any(header[0] == _NO_TENSOR for header in headers):
        here = "" if isinstance(data, torch.Tensor) else f" (here: {type(data).__name__})"
        raise TypeError(f"{call.name}() must get a torch.Tensor on all ranks, got {got}{here}")
    raise ValueError(f"{call.name}() must get the same shape and dtype on all ranks, got {got}")


def _describe_header(header: Sequence[int]) -> str:
    code, dim, dst, *dims = header
    if code == _NO_TENSOR:
        return "no tensor"
    to = f" for rank {dst}" if dst else ""
    return f"{_DTYPES[code]} of shape {tuple(dims[:dim])}{to}"


def _restore(part: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return part.view(data.dtype).view(data.shape).to(data.device)
