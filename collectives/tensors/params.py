"""Many tensors, or a list of objects, across ranks at once, changed in place."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..objects.agree import raise_together
from ..objects.objects import all_gather_object, broadcast
from ..process.ranks import comm_device, live_world_size, members, place_in_group
from ..trace.calling import calling
from ..transport.first_message import meet
from .layout import agree_on_entries, buckets, checked_tensor, describe_tensor, tensor_of
from .operations import checked_op, reduce_over

_MB = 2**20


def all_reduce_dict(
    data: dict[Any, Any], op: str = "sum", group: dist.ProcessGroup | None = None
) -> None:
    """Replace a dict's tensors by their reduction over the ranks; every rank must call this.

    The ranks' dicts must have the same keys, in any order, with the same shapes, dtypes and kinds
    of device. Each value keeps its dtype; those of one dtype travel together. Numbers count as
    tensors, floats as float64. With one process nothing changes.

    Args:
        op: as for `all_reduce`.

    Raises:
        AssertionError: on every rank, when `data` is no dict on some rank.
        ValueError: on every rank, when the operation is unknown or not defined for a value, a
            tensor is not dense, or the dicts differ.
        TypeError: on every rank, when a value is no tensor or number.
        CollectiveError: a rank does not take part.
    """
    tensors, problem = _tried(lambda: _dict_tensors(data, op))
    if live_world_size(group) == 1:
        if problem is not None:
            raise problem
        return
    op = str(op).lower()
    entries = {key: describe_tensor(tensor) for key, tensor in tensors.items()}
    with calling("dist.all_reduce_dict", group, lambda: list(entries), meets=True) as call:
        keys = agree_on_entries(call, entries, setting=repr(op), problem=problem)
        for bucket in buckets(keys, tensors):
            reduced = _reduced([tensors[key] for key in bucket], op, group)
            data.update(zip(bucket, reduced, strict=True))


def all_reduce_params(
    params: Iterable[torch.Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce parameters or buffers over the ranks in place; every rank must call this.

    Number, order, shapes and dtypes must agree between the ranks, and a tensor given twice is
    reduced once. With one process an iterator is not consumed.

    Args:
        coalesce: send the tensors of one dtype together, instead of one by one.
        bucket_size_mb: how much is sent at once (in units of 2**20 bytes); -1 is all.
        op: as for `all_reduce`.

    Raises:
        ValueError: on every rank, an unknown operation or no size, a tensor that is not dense or
            has no such operation, or tensors that differ.
        TypeError: on every rank, when something given on some rank is no tensor.
        CollectiveError: a rank does not take part.
    """
    if live_world_size(group) == 1:
        _check_settings(op, bucket_size_mb)
        return

    def make() -> dict[int, torch.Tensor]:
        _check_settings(op, bucket_size_mb)
        return _param_tensors(params, op)

    # Outside of the call: a generator is the user's code.
    tensors, problem = _tried(make)
    op = str(op).lower()
    entries = {index: describe_tensor(tensor) for index, tensor in tensors.items()}
    with calling("all_reduce_params", group, lambda: list(entries), meets=True) as call:
        setting = f"{op!r} with coalesce={coalesce} and bucket_size_mb={bucket_size_mb}"
        agree_on_entries(call, entries, setting=setting, problem=problem)
        size = bucket_size_mb * _MB if coalesce else 0
        for bucket in buckets(list(tensors), tensors, size):
            targets = [tensors[index] for index in bucket]
            is_alone = len(targets) == 1
            values = (
                [reduce_over(targets[0], op, group)] if is_alone else _reduced(targets, op, group)
            )
            for target, value in zip(targets, values, strict=True):
                if value is not target:
                    target.copy_(value)


def broadcast_object_list(
    data: list[Any], src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrite a list's objects with those of rank `src` in place; every rank must call this.

    Args:
        src: a global rank, also for a sub-group.

    Raises:
        AssertionError: on every rank, when `data` is no list on some rank.
        ValueError: on every rank, when `src` is no rank of the group, or it or the lengths differ.
        CollectiveError: on every rank, when an object cannot be pickled or unpickled; or when a
            rank does not take part.
    """
    problem: Exception | None = None
    try:
        _check_list(data, src, group)
    except (AssertionError, ValueError) as error:
        problem = error
    if live_world_size(group) == 1:
        if problem is not None:
            raise problem
        return
    own = f"{len(data)} objects from rank {src}" if problem is None else "a mistake"
    with calling("broadcast_object_list", group, lambda: own, meets=True) as call:
        headers = meet(call, agreed=own)
        if problem is not None or len({header.agreed for header in headers}) > 1:
            raise_together(problem, group, "broadcast_object_list() ")
            by_rank = dict(zip(members(group), all_gather_object(own, group), strict=True))
            raise ValueError(f"data and src must be alike on all ranks, got, by rank, {by_rank}")
        data[:] = broadcast(data, src, group)


def _check_list(data: object, src: int, group: dist.ProcessGroup | None) -> None:
    if not isinstance(data, list):
        raise AssertionError(f"data must be a list, got {type(data).__name__}")
    place_in_group(src, group)


def _tried(
    make: Callable[[], dict[Any, torch.Tensor]],
) -> tuple[dict[Any, torch.Tensor], Exception | None]:
    """Return the tensors, or why there are none: the other ranks wait to hear it."""
    try:
        return make(), None
    except Exception as error:
        return {}, error


def _dict_tensors(data: object, op: str) -> dict[Any, torch.Tensor]:
    op = checked_op(op)
    if not isinstance(data, dict):
        raise AssertionError(f"data must be a dict, got {type(data).__name__}")
    tensors = {}
    for key, value in data.items():
        tensors[key] = tensor_of(f"data[{key!r}]", value)
        _check_dtype(f"data[{key!r}]", tensors[key], op)
    return tensors


def _check_settings(op: str, bucket_size_mb: float) -> None:
    checked_op(op)
    if bucket_size_mb != -1 and bucket_size_mb <= 0:
        raise ValueError(f"bucket_size_mb must be positive or -1, got {bucket_size_mb}")


def _param_tensors(params: Iterable[torch.Tensor], op: str) -> dict[int, torch.Tensor]:
    tensors = {}
    # Tensors are hashed by identity, so this drops those given twice.
    for index, param in enumerate(dict.fromkeys(params)):
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"params[{index}] must be a tensor, got {type(param).__name__}")
        tensors[index] = checked_tensor(f"params[{index}]", param).detach()
        _check_dtype(f"params[{index}]", tensors[index], op)
    return tensors


def _check_dtype(name: str, tensor: torch.Tensor, op: str) -> None:
    try:
        checked_op(op, tensor.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _reduced(
    tensors: Sequence[torch.Tensor], op: str, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the reductions of tensors of one dtype, which travel together, as copies."""
    device = comm_device(group, prefer=tensors[0].device)
    flat = reduce_over(torch.cat([t.to(device).reshape(-1) for t in tensors]), op, group)
    parts = flat.split_with_sizes([t.numel() for t in tensors])
    return [
        part.reshape(t.shape).to(t.device, copy=True)
        for part, t in zip(parts, tensors, strict=True)
    ]
