"""The log reduction: named scalars, averaged over the ranks in one collective."""

import functools
import math
import numbers
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ..objects.agree import raise_together
from ..objects.objects import all_gather_object
from ..process.ranks import comm_device, live_world_size
from ..trace.calling import calling
from ..transport.first_message import digest, gather_rows, raise_disagreement
from .layout import checked_tensor, is_number

# Digest of the call, whether there is a problem, digest of the keys; then the first values. As long
# as the first message of the other collectives, so that a rank in one of these is found out.
_HEADER: Final = struct.Struct("<8sq16s")
_VALUES: Final = 124
_NUMBER_BYTES: Final = 8


def mean_scalars(
    scalars: Mapping[str, torch.Tensor | float], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return each scalar's mean over the ranks that have it; every rank must call this.

    Tensors must have one element; a rank's NaN or infinity reaches its own key only. The order is
    the caller's own, or that of the union over the ranks when their keys differ. With one process
    the scalars come back as floats.

    Protocol: each rank sends all others 1 KiB: a digest of the call, whether it has a problem, a
    digest of its sorted keys and 124 values in their order, as float64. This is an `all_gather`
    on every transport, whose rows each rank sums in rank order, so that all get the same bits;
    gloo's `all_reduce` of as many numbers takes twice as long.

    - Keys agree: the sums are the answer, one collective in all. The values after the first 124
      follow in a second message, whose size the digest has settled.
    - Keys differ: the dicts themselves are gathered.
    - Some rank's scalars are no scalars: the errors are gathered and raised on every rank.

    Raises:
        TypeError, ValueError: on every rank, when some rank's key is no string or its value no
            scalar.
        CollectiveError: on every rank, when one is in another collective; or when a rank does not
            take part.
    """
    problem: Exception | None = None
    try:
        _check(scalars)
    # Whatever the user's mapping raises, the other ranks are waiting.
    except Exception as error:
        problem = error
    world_size = live_world_size(group)
    if world_size == 1:
        if problem is not None:
            raise problem
        return dict(zip(scalars, _to_floats(scalars.values()), strict=True))
    keys, keys_digest = _sort_and_digest(() if problem else tuple(scalars))
    device = comm_device(group)
    values = [scalars[key] for key in keys]
    call_digest = digest("mean_scalars")[:8]
    header = _HEADER.pack(call_digest, problem is not None, keys_digest)
    message = _encode(header, values[:_VALUES], device, _VALUES)
    rest = _encode(b"", values[_VALUES:], device, len(keys) - _VALUES)
    with calling("mean_scalars", group, lambda: keys, meets=True) as call:
        rows = gather_rows(message, group)
        headers = [_HEADER.unpack_from(row) for row in rows]
        if any(other[0] != call_digest for other in headers):
            raise_disagreement(call)
        if any(other[1] for other in headers):
            raise_together(problem, group, "mean_scalars() ")
        if any(other[2] != keys_digest for other in headers):
            return _mean_of_union(dict(zip(keys, _to_floats(values), strict=True)), group)
        totals = _sum(rows, _HEADER.size, min(len(keys), _VALUES))
        if len(keys) > _VALUES:
            totals += _sum(gather_rows(rest, group), 0, len(keys) - _VALUES)
    means = {key: total / world_size for key, total in zip(keys, totals, strict=True)}
    return {key: means[key] for key in scalars}


def _check(scalars: object) -> None:
    if not isinstance(scalars, Mapping):
        raise TypeError(f"scalars must be a mapping, got {type(scalars).__name__}")
    for key, value in scalars.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of scalars must be strings, got {key!r}")
        _check_value(f"scalars[{key!r}]", value)


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            what = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            raise ValueError(f"{name} must be one real number, got {what}")
        checked_tensor(name, value)
        return
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if is_complex or not is_number(value):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    # As Python's own: NumPy would compare in the type of its number.
    number = value.item() if hasattr(value, "item") else value
    if abs(number) > sys.float_info.max and number not in (math.inf, -math.inf):
        raise ValueError(f"{name} must fit a float")


@functools.lru_cache(maxsize=128)
def _sort_and_digest(keys: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    in_order = tuple(sorted(keys))
    return in_order, digest(repr(in_order))


def _encode(
    header: bytes, values: Sequence[torch.Tensor | float], device: torch.device, size: int
) -> torch.Tensor:
    """Return header and values, padded to `size` of them, as bytes on the device."""
    if size <= 0:
        return torch.empty(0, dtype=torch.uint8)
    here = [i for i, value in enumerate(values) if device.type != "cpu" and _is_on(device, value)]
    # Those that are on the device stay there until the message is.
    away = set(here)
    numbers_here = _to_floats(0.0 if i in away else value for i, value in enumerate(values))
    memory = bytearray(len(header) + _NUMBER_BYTES * size)
    memory[: len(header)] = header
    struct.pack_into(f"<{len(values)}d", memory, len(header), *numbers_here)
    message = torch.frombuffer(memory, dtype=torch.uint8).to(device)
    if here:
        first = len(header) // _NUMBER_BYTES
        places = torch.tensor([first + i for i in here], device=device)
        message.view(torch.float64)[places] = _stack([values[i] for i in here])
    return message


def _sum(rows: Iterable[memoryview], start: int, count: int) -> list[float]:
    """Return the sums over the rows, in their order, of `count` numbers from byte `start` on."""
    numbers_by_rank = (struct.unpack_from(f"<{count}d", row, start) for row in rows)
    return [sum(column) for column in zip(*numbers_by_rank, strict=True)]


def _is_on(device: torch.device, value: torch.Tensor | float) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _stack(values: Iterable[torch.Tensor | float]) -> torch.Tensor:
    tensors = [torch.as_tensor(value).detach().reshape(()) for value in values]
    return torch.stack([tensor.to(torch.float64) for tensor in tensors])


def _to_floats(values: Iterable[torch.Tensor | float]) -> list[float]:
    """Return the values as floats, with one transfer to the host for each device."""
    values = list(values)
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            by_device.setdefault(value.device, []).append(i)
    floats: dict[int, float] = {}
    for places in by_device.values():
        floats |= zip(places, _stack([values[i] for i in places]).tolist(), strict=True)
    # item(), because float() warns about tensors that require a gradient.
    return [
        floats[i] if i in floats else float(v.item() if isinstance(v, torch.Tensor) else v)
        for i, v in enumerate(values)
    ]


def _mean_of_union(own: dict[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for rank_scalars in all_gather_object(own, group):
        for key, value in rank_scalars.items():
            gathered.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in gathered.items()}
