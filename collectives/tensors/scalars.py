"""Average named scalars, such as logs, over the ranks in one collective."""

import math
import numbers
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from ...primitives.tensor_bits import widened
from ..errors import Group, attempt
from ..objects.agree import agree
from ..process.ranks import live_world_size
from ..trace.calling import calling
from ..trace.headers import INLINE_BYTES, gather_numbers
from .checks import checked_tensor, is_number

_VALUES: Final = INLINE_BYTES // 8


def mean_scalars(
    scalars: Mapping[str, torch.Tensor | float], group: Group = None
) -> dict[str, float]:
    """Return each scalar's mean over the ranks that have it; every rank must call this.

    Tensors must have one element. A NaN or infinity only affects its own key. The result has the
    order of this rank's keys; if keys differ between ranks, lower ranks' keys come first. With one
    process the scalars are returned as floats.

    Each rank sends 1 KiB to all others: digests of the call and of its sorted keys, and the first
    124 values as float64. Each rank adds the values in rank order, so all get the same bits. This
    is one collective, and a second one for more than 124 values. If keys differ or a value is
    invalid, the whole dicts or the errors are gathered afterwards.

    Raises:
        TypeError, ValueError: on every rank, if some rank's key is not a string or its value not
            a scalar.
        CollectiveError: on every rank, if one is in another collective; or if a rank does not take
            part.
    """
    world_size = live_world_size(group)
    if world_size == 1:
        return _floats(scalars)
    floats, problem = attempt(lambda: _floats(scalars))
    local_values = floats or {}
    keys = sorted(local_values)
    values = [local_values[key] for key in keys]
    inline = struct.pack(f"<{len(values[:_VALUES])}d", *values[:_VALUES])
    with calling("mean_scalars", group, lambda: keys, has_headers=True) as call:
        headers, by_rank = agree(
            call, repr(keys), lambda: local_values, problem=problem, inline=[inline]
        )
        if by_rank is not None:
            return _mean_of_union(by_rank)
        rows = [struct.unpack(f"<{len(header.inline) // 8}d", header.inline) for header in headers]
        if len(keys) > _VALUES:
            gathered = gather_numbers(values[_VALUES:], group, "d")
            rows = [row + more for row, more in zip(rows, gathered, strict=True)]
    totals = dict(zip(keys, map(sum, zip(*rows, strict=True)), strict=True))
    return {key: totals[key] / world_size for key in local_values}


def _floats(scalars: object) -> dict[str, float]:
    """Return the scalars as floats, with one transfer to the host for each device."""
    if not isinstance(scalars, Mapping):
        raise TypeError(f"scalars must be a mapping, got {type(scalars).__name__}")
    floats: dict[str, float] = {}
    by_device: dict[torch.device, list[str]] = {}
    for key, value in scalars.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of scalars must be strings, got {key!r}")
        _check_value(f"scalars[{key!r}]", value)
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            by_device.setdefault(value.device, []).append(key)
            value = 0.0
        # Not float(), which warns about tensors that require a gradient.
        floats[key] = float(value.item() if isinstance(value, torch.Tensor) else value)
    for keys in by_device.values():
        tensors = [widened(scalars[key].detach().reshape(())) for key in keys]
        floats |= zip(keys, torch.stack(tensors).tolist(), strict=True)
    return floats


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            received_kind = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            raise ValueError(f"{name} must be one real number, got {received_kind}")
        checked_tensor(name, value)
        return
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if is_complex or not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    # Compare as a Python number, because NumPy would compare in its own dtype.
    number = value.item() if hasattr(value, "item") else value
    if abs(number) > sys.float_info.max and number not in (math.inf, -math.inf):
        raise ValueError(f"{name} must fit a float")


def _mean_of_union(by_rank: Iterable[Mapping[str, float]]) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for scalars in by_rank:
        for key, value in scalars.items():
            gathered.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in gathered.items()}
