"""Tensors and dicts of tensors, reduced across ranks."""

from __future__ import annotations

import numbers
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ._call import calling
from ._layout import agree_on_entries, buckets, describe_tensor
from .process import comm_device, live_world_size

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=torch.Tensor | complex)

REDUCE_OPS = ("sum", "mean", "min", "max")
_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def reduce_mean(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean of the ranks' tensors as a new tensor; every rank must call this.

    The shapes must agree. Integers give float32. The result is detached: no gradient flows to any
    rank. With one process it is the tensor itself.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    world_size = live_world_size(group)
    if world_size == 1:
        return tensor
    is_inexact = tensor.is_floating_point() or tensor.is_complex()
    dtype = tensor.dtype if is_inexact else torch.float32
    # Divided first, so that a sum of halves cannot overflow.
    share = tensor.detach().to(comm_device(group, prefer=tensor.device), dtype) / world_size
    share = share.contiguous()
    with calling("reduce_mean", group, lambda: describe_tensor(tensor)):
        dist.all_reduce(share, group=group)
    return share.to(tensor.device)


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
        to_float: make every result floating point: float64 for integers, which are reduced exactly
            as int64, and float32 for halves. Otherwise dtypes are kept, except that the mean of
            integers is always float64. A Python float counts as float64.

    Raises:
        ValueError: an unknown operation; on every rank, dicts that differ.
        TypeError: `py_dict` is no mapping; on every rank, a value that is no tensor or number.
    """
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
    if not isinstance(py_dict, Mapping):
        raise TypeError(f"py_dict must be a mapping, got {type(py_dict).__name__}")
    tensors, problem = _to_tensors(py_dict, reduce_op)
    world_size = live_world_size(group)
    if world_size == 1:
        if problem is not None:
            raise problem
        return py_dict
    entries = {key: describe_tensor(tensor) for key, tensor in tensors.items()}
    setting = f"{reduce_op}, to_float={to_float}"
    reduced: dict[K, torch.Tensor] = {}
    with calling("all_reduce_dict", group, lambda: list(py_dict), meets=True) as call:
        in_order = agree_on_entries(call, entries, setting=setting, problem=problem)
        for keys in buckets(in_order, tensors):
            reduced |= _reduce_bucket({key: tensors[key] for key in keys}, reduce_op, group)
    make = OrderedDict if isinstance(py_dict, OrderedDict) else dict
    return make(
        (key, _finish(reduced[key], tensor.dtype, reduce_op, to_float, world_size))
        for key, tensor in tensors.items()
    )


def _to_tensors(
    py_dict: Mapping[K, object], reduce_op: str
) -> tuple[dict[K, torch.Tensor], Exception | None]:
    """Return the values as tensors, and what is wrong with one of them."""
    tensors: dict[K, torch.Tensor] = {}
    for key, value in py_dict.items():
        if not isinstance(value, torch.Tensor | numbers.Number):
            what = type(value).__name__
            return {}, TypeError(f"py_dict[{key!r}] must be a tensor or a number, got {what}")
        try:
            dtype = torch.float64 if isinstance(value, float) else None
            tensors[key] = torch.as_tensor(value, dtype=dtype)
        # Whatever torch raises, the other ranks wait for this one's answer.
        except Exception as error:
            return {}, ValueError(f"py_dict[{key!r}] must fit a tensor, got {value}: {error}")
        if reduce_op in ("min", "max") and tensors[key].is_complex():
            return {}, ValueError(f"py_dict[{key!r}] is complex, which has no {reduce_op}")
    return tensors, None


def _reduce_bucket(
    tensors: Mapping[K, torch.Tensor], reduce_op: str, group: dist.ProcessGroup | None
) -> dict[K, torch.Tensor]:
    """Reduce tensors of one dtype and kind of device in one collective."""
    own: Sequence[torch.Tensor] = list(tensors.values())
    carrier = _carrier(own[0].dtype)
    device = comm_device(group, prefer=own[0].device)
    flat = torch.cat([t.detach().to(device, carrier).reshape(-1) for t in own])
    dist.all_reduce(flat, _TORCH_OPS[reduce_op], group)
    parts = flat.split_with_sizes([t.numel() for t in own])
    return {
        key: part.reshape(tensor.shape).to(tensor.device, copy=True)
        for (key, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return a type that every transport can reduce and in which small types do not overflow."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.float32)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def _finish(
    reduced: torch.Tensor, dtype: torch.dtype, reduce_op: str, to_float: bool, world_size: int
) -> torch.Tensor:
    """Divide for a mean and cast to the documented dtype."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if is_integer and (to_float or reduce_op == "mean"):
        reduced = reduced.to(torch.float64)
    if reduce_op == "mean":
        reduced = reduced / world_size
    keeps_dtype = not to_float and not (is_integer and reduce_op == "mean")
    return reduced.to(dtype) if keeps_dtype else reduced
