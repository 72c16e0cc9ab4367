"""Collectives on dense tensors of every dtype, on any device and backend; barriers.

Each function raises a CollectiveError if a rank does not take part.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...primitives.tensor_bits import tensor_bytes
from ..errors import Call, Group, attempt, ranks_by_text
from ..objects.agree import agree
from ..process.ranks import (
    comm_device,
    launched_local_rank,
    live_world_size,
    members,
    place_in_group,
)
from ..trace.calling import calling
from ..trace.headers import INLINE_BYTES
from .checks import checked_tensor, checking, describe_tensor
from .operations import (
    Reduction,
    as_sent,
    carrier,
    check_reduced,
    checked_op,
    start_all_gather,
)


def all_reduce(data: torch.Tensor, op: str = "sum", group: Group = None) -> None:
    """Reduce a tensor over the ranks in place; every rank must call this.

    Shapes and dtypes must be the same on all ranks; only tracing checks this. The sum of booleans
    is True if any of them is. The mean keeps the dtype: for integers it is rounded to the nearest,
    halves to even, and a warning is logged once if that changes a value.

    Args:
        data: a dense tensor.
        op: "sum", "product", "min", "max", "band", "bor", "bxor" or "mean". Complex numbers only
            have sum, product and mean; floating-point numbers have no bitwise operations.

    Raises:
        TypeError, ValueError: the data is not a dense tensor, or the operation is unknown or not
            defined for its dtype. Only this rank raises it. At the timeout the others raise a
            CollectiveError that names this rank. While tracing, all raise that error immediately.
    """
    world_size = live_world_size(group)
    with checking("all_reduce", group, lambda: f"{op} of {describe_tensor(data)}"):
        target = checked_tensor("data", data).detach()
        op = checked_op(op, data.dtype)
        if world_size == 1:
            return
        reduction = Reduction(target, op, group)
    with calling("all_reduce", group, lambda: f"{op} of {describe_tensor(data)}"):
        reduction.start().wait()
    reduced = reduction.result()
    if reduced is not target:
        target.copy_(reduced)


def reduce_mean(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the mean of the ranks' tensors as a new tensor; every rank must call this.

    The shapes must be the same on all ranks; only tracing checks this. For integers the result is
    float32. It is detached, so no gradient flows to any rank. With one process the tensor itself is
    returned. Errors are as for ``all_reduce``.
    """
    world_size = live_world_size(group)
    with checking("reduce_mean", group, lambda: describe_tensor(tensor)):
        checked_tensor("tensor", tensor)
        check_reduced(tensor.dtype)
        if world_size == 1:
            return tensor
        is_inexact = tensor.is_floating_point() or tensor.is_complex()
        dtype = tensor.dtype if is_inexact else torch.float32
        # Divide first, so that the sum cannot overflow.
        share = tensor.detach().to(carrier(dtype, is_wide=True)) / world_size
        share = as_sent(share, comm_device(group, prefer=tensor.device))
    with calling("reduce_mean", group, lambda: describe_tensor(tensor)):
        dist.all_reduce(share, group=group)
    return share.to(tensor.device, dtype)


def broadcast(data: torch.Tensor, src: int = 0, group: Group = None) -> None:
    """Overwrite a tensor in place with the tensor of rank ``src``; every rank must call this.

    Shapes and dtypes must be the same on all ranks; only tracing checks this. ``src`` is a global
    rank, even in a sub-group; a rank outside of the group raises ValueError. Other errors are as
    for ``all_reduce``.
    """
    world_size = live_world_size(group)
    with checking("dist.broadcast", group, lambda: f"{describe_tensor(data)} from rank {src}"):
        target = checked_tensor("data", data).detach()
        place_in_group(src, group)
        if world_size == 1:
            return
        sent = as_sent(target, comm_device(group, prefer=target.device))
        memory = tensor_bytes(sent)
    with calling("dist.broadcast", group, lambda: f"{describe_tensor(data)} from rank {src}"):
        dist.broadcast(memory, src, group)
    if sent is not target and dist.get_rank() != src:
        target.copy_(sent)


def all_gather(data: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on every rank; every rank must call this.

    All of them, including the caller's, are detached copies on the device of ``data``; with one
    process the list contains ``data`` itself.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ, or some rank's data is sparse, meta,
            nested or quantized.
        TypeError: on every rank, if some rank's data is not a tensor.
    """
    return _gather("all_gather", data, None, group)


def gather(data: torch.Tensor, dst: int = 0, group: Group = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on rank ``dst``; every rank must call this.

    The other ranks get an empty list. Otherwise like ``all_gather``. ``dst`` is a global rank; if
    it differs between ranks or is not a rank of the group, every rank raises ValueError.
    """
    return _gather("gather", data, dst, group)


def synchronize(timeout_s: float | None = None, group: Group = None) -> None:
    """Wait until every rank has called this; every rank must call this.

    Args:
        timeout_s: the timeout in seconds; default: the group's timeout.

    Raises:
        ValueError: ``timeout_s`` is not positive.
        CollectiveError: some ranks have not called this in time; it names them.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    if live_world_size(group) == 1:
        return
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    live = group or dist.group.WORLD
    assert live is not None
    # No header exchange while tracing, because it would wait for the group's timeout.
    with calling("synchronize", group, has_headers=True):
        if backends.get("cpu") == "gloo":
            # The only barrier of torch that names missing ranks. The group's method is used because
            # the function of torch.distributed rejects groups not created with the name "gloo".
            live.monitored_barrier(timeout, wait_all_ranks=True)  # type: ignore[attr-defined]
            return
        # A timeout of 0 means the group's timeout.
        start_barrier(group).wait(timeout or timedelta(0))


def start_barrier(group: Group = None) -> dist.Work:
    """Start torch's barrier; every rank must call this."""
    device_ids = None
    if "cuda:nccl" in dist.get_backend_config(group).split(","):
        # Not get_local_rank(): all ranks must call it, but only members of the group are here.
        # A host may also have more ranks than devices.
        local_rank = launched_local_rank()
        is_device = local_rank is not None and local_rank < torch.cuda.device_count()
        device_ids = [local_rank if is_device else torch.cuda.current_device()]
    work: dist.Work = dist.barrier(group, async_op=True, device_ids=device_ids)
    return work


def _gather(name: str, data: torch.Tensor, dst: int | None, group: Group) -> list[torch.Tensor]:
    def make() -> torch.Tensor:
        checked_tensor("data", data)
        if dst is not None:
            place_in_group(dst, group, "dst")
        return tensor_bytes(as_sent(data, comm_device(group, prefer=data.device)))

    if live_world_size(group) == 1:
        make()
        return [data]
    contiguous, problem = attempt(make)
    to = "" if dst is None else f" to rank {dst}"
    with calling(name, group, lambda: f"{describe_tensor(data)}{to}", has_headers=True) as call:
        received = _gather_bytes(call, data, contiguous, problem, dst)
    return [rank_bytes.view(data.dtype).view(data.shape).to(data.device) for rank_bytes in received]


def _gather_bytes(
    call: Call,
    data: torch.Tensor,
    contiguous: torch.Tensor | None,
    problem: Exception | None,
    dst: int | None,
) -> list[torch.Tensor]:
    """Return the tensors of all ranks as bytes, [] on ranks that receive none.

    ``contiguous`` is this rank's tensor as bytes, or None if it has a ``problem``.
    """
    group, description, memory = call.group, "", torch.empty(0, dtype=torch.uint8)
    if contiguous is not None:
        memory = contiguous
        description = f"{data.dtype} of shape {tuple(data.shape)}"
        description += "" if dst is None else f" for rank {dst}"
    is_small = memory.numel() <= INLINE_BYTES
    inline = [memory.cpu().numpy().data] if is_small else []
    text = f"{description} on {memory.device.type}"
    headers, texts = agree(call, text, lambda: description, problem=problem, inline=inline)
    if texts is not None:
        _check_same(call, "shape and dtype" if dst is None else "shape, dtype and dst", texts)
        # Only the devices differ: use a device that all ranks support.
        memory = memory.to(comm_device(group))
    receives = dst is None or dst == dist.get_rank()
    if is_small:
        return [_make_copy(header.inline) for header in headers] if receives else []
    received = [torch.empty_like(memory) for _ in headers] if receives else []
    if dst is None:
        for work in start_all_gather(received, memory, group):
            work.wait()
    else:
        dist.gather(memory, received or None, dst, group)
    return received


def _check_same(call: Call, names: str, texts: Sequence[str]) -> None:
    """Raise ValueError on every rank if the arguments with these names differ."""
    ranks_of = ranks_by_text(dict(zip(members(call.group), texts, strict=True)))
    if len(ranks_of) > 1:
        got = "; ".join(f"{t} on rank {', '.join(map(str, on))}" for t, on in ranks_of.items())
        raise ValueError(f"{call.name}() must get the same {names} on all ranks, got {got}")


def _make_copy(data: memoryview) -> torch.Tensor:
    # torch.frombuffer rejects an empty buffer.
    return torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0).byte()
