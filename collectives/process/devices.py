"""Nested tensors and the device they are on, should travel on or should move to."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .ranks import comm_device

T = TypeVar("T")


def get_data_device(data: object) -> torch.device:
    """Return the one device of all tensors in nested lists, tuples, sets and dicts.

    Raises:
        ValueError: the tensors are on different devices, or there are none.
        TypeError: something in there is no tensor.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in _tensors(data)))
    if len(devices) > 1:
        got = ", ".join(map(str, devices))
        raise ValueError(f"device type in data should be consistent, but got {got}")
    return devices[0]


def get_comm_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which tensors travel in the group; the CPU without one.

    It is that of the first backend in the group's configuration: CUDA for NCCL alone, the CPU for
    gloo and for "cpu:gloo,cuda:nccl".
    """
    return comm_device(group)


def cast_data_device(data: T, device: torch.device | str, out: T | None = None) -> T:
    """Return nested tensors on a device; those that are there already are not copied.

    Lists, tuples, namedtuples, sets and dicts of any class are rebuilt in their own class.

    Args:
        out: tensors nested in the same way, which are filled in place as well.

    Raises:
        ValueError: a container is empty, or `out` has other lengths, keys or shapes.
        TypeError: something in there is no tensor, or `out` is of another class, or is a set, whose
            order is not defined. Nothing has been filled then.
    """
    if out is not None:
        # Once before anything is filled, for its errors.
        list(_paired(data, out))
    moved = _move(data, torch.device(device))
    if out is not None:
        for source, target in _paired(moved, out):
            target.copy_(source)
    return moved  # type: ignore[no-any-return]


def _children(data: object, listed: str = "list") -> list[Any]:
    """Return what a container holds, a mapping's values in the order of its keys.

    Args:
        listed: the word for sequences in the error that is documented for the caller.
    """
    if isinstance(data, Mapping):
        children = list(data.values())
    elif isinstance(data, list | tuple | AbstractSet):
        children = list(data)
    else:
        raise TypeError(
            f"data should be a Tensor, {listed} of tensor or dict, but got {type(data).__name__}"
        )
    if not children:
        raise ValueError(f"data should not be empty, but got {data!r}")
    return children


def _tensors(data: object) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for child in _children(data, "sequence"):
            yield from _tensors(child)


def _move(data: Any, device: torch.device) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device)
    children = [_move(child, device) for child in _children(data)]
    if isinstance(data, Mapping):
        items = dict(zip(data, children, strict=True))
        if isinstance(data, defaultdict):
            return type(data)(data.default_factory, items)
        return type(data)(items)  # type: ignore[call-arg]
    # A namedtuple takes its fields one by one.
    return type(data)(*children) if hasattr(data, "_fields") else type(data)(children)


def _paired(data: Any, out: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of data with its place in out."""
    if isinstance(data, torch.Tensor) and isinstance(out, torch.Tensor):
        if data.shape != out.shape:
            got = f"{tuple(out.shape)} for {tuple(data.shape)}"
            raise ValueError(f"out should have the shape of data, but got {got}")
        yield data, out
        return
    if type(data) is not type(out):
        got = f"{type(out).__name__} for {type(data).__name__}"
        raise TypeError(f"out should be the same type with data, but got {got}")
    if isinstance(out, AbstractSet):
        raise TypeError("out should not be a set")
    children = _children(data)
    if isinstance(data, Mapping):
        _check_keys(data, out)
        targets = [out[key] for key in data]
    else:
        targets = list(out)
    if len(children) != len(targets):
        got = f"{len(targets)} for {len(children)}"
        raise ValueError(f"out should have the length of data, but got {got}")
    for child, target in zip(children, targets, strict=True):
        yield from _paired(child, target)


def _check_keys(data: Mapping[Any, object], out: Mapping[Any, object]) -> None:
    missing = [key for key in data if key not in out]
    extra = [key for key in out if key not in data]
    if missing or extra:
        raise ValueError(
            f"out should have the keys of data, but lacks {missing} and has {extra} as well"
        )
