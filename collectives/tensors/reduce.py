"""Tensors and dicts of tensors, reduced across ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from ..process.ranks import comm_device, live_world_size
from ..trace.calling import calling
from .layout import agree_on_entries, buckets, checked_tensor, checking, describe_tensor, tensor_of
from .operations import Reduction, as_sent, carrier, check_reduced

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=torch.Tensor | complex)

REDUCE_OPS = ("sum", "mean", "min", "max")


def reduce_mean(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean of the ranks' tensors as a new tensor; every rank must call this.

    The shapes must agree, which is not checked. Integers give float32. The result is detached: no
    gradient flows to any rank. With one process it is the tensor itself.

    Raises:
        TypeError, ValueError: it is no tensor, or a sparse, meta or quantized one; on that rank
            only, and the others end at the timeout with an error that names it. While tracing it
            is a CollectiveError on every rank at once.
        CollectiveError: a rank does not take part.
    """
    world_size = live_world_size(group)
    with checking("reduce_mean", group, lambda: describe_tensor(tensor)):
        checked_tensor("tensor", tensor)
        check_reduced(tensor.dtype)
        if world_size == 1:
            return tensor
        is_inexact = tensor.is_floating_point() or tensor.is_complex()
        dtype = tensor.dtype if is_inexact else torch.float32
        # Divided first, so that a sum cannot overflow.
        share = tensor.detach().to(carrier(dtype, is_wide=True)) / world_size
        share = as_sent(share, comm_device(group, prefer=tensor.device))
    with calling("reduce_mean", group, lambda: describe_tensor(tensor)):
        dist.all_reduce(share, group=group)
    return share.to(tensor.device, dtype)


def all_reduce_dict(
    py_dict: Mapping[K, V],
    reduce_op: str = "sum",
    to_float: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Mapping[K, V | torch.Tensor]:
    """Reduce a dict of tensors or numbers over the ranks; every rank must call this.

    The ranks' dicts must have the same keys, in any order, with the same shapes, dtypes and kinds
    of device. All entries of one dtype travel together. With one process the dict itself comes
    back, untouched; otherwise a new one (an OrderedDict for an OrderedDict) of tensors, in the
    caller's own order.

    Args:
        reduce_op: "sum", "mean", "min" or "max".
        to_float: make every result floating point: float64 for integers, which are summed exactly
            before, and float32 for halves. Otherwise dtypes are kept, except that the mean of
            integers is always float64. A Python float counts as float64.

    Raises:
        ValueError: on every rank, an unknown operation, a tensor that is not dense, or dicts that
            differ.
        TypeError: on every rank, `py_dict` is no mapping, or a value is no tensor or number.
        CollectiveError: a rank does not take part.
    """
    tensors: dict[K, torch.Tensor] = {}
    problem: Exception | None = None
    try:
        tensors = _to_tensors(py_dict, reduce_op)
    # Whatever the user's mapping or torch raises, the other ranks wait for this one's answer.
    except Exception as error:
        problem = error
    if live_world_size(group) == 1:
        if problem is not None:
            raise problem
        return py_dict
    entries = {key: describe_tensor(tensor) for key, tensor in tensors.items()}
    setting = f"{reduce_op}, to_float={to_float}"
    reduced: dict[K, torch.Tensor] = {}
    with calling("all_reduce_dict", group, lambda: list(entries), meets=True) as call:
        in_order = agree_on_entries(call, entries, setting=setting, problem=problem)
        for keys in buckets(in_order, tensors):
            bucket = {key: tensors[key] for key in keys}
            reduced |= _reduce_bucket(bucket, reduce_op, to_float, group)
    make = OrderedDict if isinstance(py_dict, OrderedDict) else dict
    return make((key, reduced[key]) for key in tensors)


def _to_tensors(py_dict: Mapping[K, object], reduce_op: str) -> dict[K, torch.Tensor]:
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
    if not isinstance(py_dict, Mapping):
        raise TypeError(f"py_dict must be a mapping, got {type(py_dict).__name__}")
    tensors: dict[K, torch.Tensor] = {}
    for key, value in py_dict.items():
        name = f"py_dict[{key!r}]"
        tensors[key] = tensor_of(name, value)
        if reduce_op in ("min", "max") and tensors[key].is_complex():
            raise ValueError(f"{name} is complex, which has no {reduce_op}")
    return tensors


def _reduce_bucket(
    tensors: Mapping[K, torch.Tensor],
    reduce_op: str,
    to_float: bool,
    group: dist.ProcessGroup | None,
) -> dict[K, torch.Tensor]:
    """Reduce tensors of one dtype and kind of device in one collective."""
    own = list(tensors.values())
    device = comm_device(group, prefer=own[0].device)
    flat = torch.cat([t.to(device).reshape(-1) for t in own])
    reduction = Reduction(flat, reduce_op, group, is_wide=True)
    reduction.run()
    parts = reduction.wide_result(to_float).split_with_sizes([t.numel() for t in own])
    return {
        key: part.reshape(tensor.shape).to(tensor.device, copy=True)
        for (key, tensor), part in zip(tensors.items(), parts, strict=True)
    }
