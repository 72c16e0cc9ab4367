"""The log reduction: named scalars, averaged over the ranks in one collective."""

import functools
import hashlib
import math
import numbers
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ._call import calling
from .agree import raise_together
from .objects import all_gather_object
from .process import comm_device, live_world_size

# A 128-bit digest of the keys, as 16-bit numbers whose squares still sum exactly in float64.
_DIGEST_PARTS = 8
_HEADER = 1 + 2 * _DIGEST_PARTS
_VALUES = 64


def mean_scalars(
    scalars: Mapping[str, torch.Tensor | float], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return each scalar's mean over the ranks that have it; every rank must call this.

    Tensors must have one element; a rank's NaN or infinity reaches its own key only. The order is
    the caller's own, or that of the union over the ranks when their keys differ. With one process
    the scalars come back as floats.

    Protocol: the first message has the same size on every rank, whatever the keys are. It is a
    float64 vector, summed over the ranks: [number of ranks that have a problem; a 128-bit digest
    of the sorted keys as 8 numbers d below 2**16; their squares; 64 values in the order of the
    sorted keys, padded with zeros]. Because `ranks * sum(d**2) == sum(d)**2` exactly when all d
    are equal, every rank sees from the same sums whether all keys agree, and so all ranks take the
    same way from there:

    - Keys agree: the sums are the answer, one collective in all. The values after the first 64
      follow in a second message, whose size the digest has settled.
    - Keys differ: the dicts themselves are gathered.
    - Some rank's scalars are no scalars: the errors are gathered and raised on every rank.

    Raises:
        TypeError, ValueError: on every rank, when some rank's key is no string or its value no
            scalar.
        CollectiveError: a rank does not take part.
    """
    problem = _find_problem(scalars)
    world_size = live_world_size(group)
    if world_size == 1:
        if problem is not None:
            raise problem
        return dict(zip(scalars, _to_floats(scalars.values()), strict=True))
    keys, digest = _sort_and_digest(() if problem else tuple(scalars))
    device = comm_device(group)
    values = [scalars[key] for key in keys]
    header = [float(problem is not None), *digest, *(d * d for d in digest)]
    with calling("mean_scalars", group, lambda: list(scalars), must_agree=False):
        sums = _sum(header, values[:_VALUES], device, _HEADER + _VALUES, group)
        if sums[0]:
            raise_together(problem, group, "mean_scalars() ")
        if not _is_same_everywhere(sums[1:_HEADER], world_size):
            return _mean_of_union(dict(zip(keys, _to_floats(values), strict=True)), group)
        totals = sums[_HEADER:]
        if len(keys) > _VALUES:
            totals += _sum([], values[_VALUES:], device, len(keys) - _VALUES, group)
    means = {key: total / world_size for key, total in zip(keys, totals, strict=False)}
    return {key: means[key] for key in scalars}


def _find_problem(scalars: Mapping[str, torch.Tensor | float]) -> Exception | None:
    if not isinstance(scalars, Mapping):
        return TypeError(f"scalars must be a mapping, got {type(scalars).__name__}")
    for key, value in scalars.items():
        if not isinstance(key, str):
            return TypeError(f"the keys of scalars must be strings, got {key!r}")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                what = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
                return ValueError(f"scalars[{key!r}] must be one real number, got {what}")
        elif not isinstance(value, numbers.Real):
            what = type(value).__name__
            return TypeError(f"scalars[{key!r}] must be a number or a tensor, got {what}")
        elif abs(value) > sys.float_info.max and value not in (math.inf, -math.inf):
            return ValueError(f"scalars[{key!r}] must fit a float")
    return None


@functools.lru_cache(maxsize=128)
def _sort_and_digest(keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    in_order = tuple(sorted(keys))
    digest = hashlib.blake2b(repr(in_order).encode(), digest_size=2 * _DIGEST_PARTS).digest()
    return in_order, tuple(map(float, struct.unpack(f"<{_DIGEST_PARTS}H", digest)))


def _is_same_everywhere(sums: Sequence[float], world_size: int) -> bool:
    """Compare in integers: float64 holds these sums exactly, but not the products."""
    parts, squares = sums[:_DIGEST_PARTS], sums[_DIGEST_PARTS:]
    return all(
        world_size * int(square) == int(part) ** 2
        for part, square in zip(parts, squares, strict=True)
    )


def _sum(
    header: list[float],
    values: Sequence[torch.Tensor | float],
    device: torch.device,
    size: int,
    group: dist.ProcessGroup | None,
) -> list[float]:
    """Sum header and values, padded to `size`, over the ranks; one transfer to the host."""
    padding = [0.0] * (size - len(header) - len(values))
    if device.type == "cpu":
        vector = torch.tensor(header + _to_floats(values) + padding, dtype=torch.float64)
    else:
        vector = torch.tensor(
            header + _to_floats(0.0 if _is_on(device, v) else v for v in values) + padding,
            dtype=torch.float64,
            device=device,
        )
        here = [i for i, value in enumerate(values) if _is_on(device, value)]
        if here:
            places = torch.tensor([len(header) + i for i in here], device=device)
            vector[places] = _stack([values[i] for i in here])
    dist.all_reduce(vector, group=group)
    sums: list[float] = vector.tolist()
    return sums


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
