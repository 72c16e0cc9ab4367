"""Reduce dicts of tensors and lists of parameters over the ranks.

Each function raises a CollectiveError if a rank does not take part.
"""

import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from ..errors import Call, Group, Place, attempt, call_site, describe_places, differences
from ..objects.agree import agree
from ..process.ranks import comm_device, live_world_size, members
from ..trace.calling import calling
from .checks import checked_tensor, describe_tensor, make_tensor
from .operations import Reduction, checked_op

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=torch.Tensor | complex)

REDUCE_OPS = ("sum", "mean", "min", "max")
_MB = 2**20
_CLEAR_KEYS = (str, int, float, bool, bytes, type(None))


def all_reduce_dict(
    py_dict: Mapping[K, V], reduce_op: str = "sum", to_float: bool = True, group: Group = None
) -> Mapping[K, V | torch.Tensor]:
    """Reduce a dict of tensors or numbers over the ranks; every rank must call this.

    All ranks' dicts must have the same keys, in any order, with the same shapes, dtypes and device
    types. Entries of one dtype are sent together. The result is a new dict of tensors in the
    caller's order, an OrderedDict if ``py_dict`` is one; with one process, it is ``py_dict``
    itself.

    Args:
        py_dict: tensors or numbers by key; a Python float counts as float64.
        reduce_op: "sum", "mean", "min" or "max".
        to_float: if True, results are floating-point: float64 for integers and float32 for half
            types. A sum of integers is exact before it becomes float64. If False, dtypes are kept,
            but the mean of integers is float64 in any case.

    Raises:
        TypeError, ValueError: on every rank, if the operation is unknown, a value is neither a
            dense tensor nor a number, or the dicts differ.
    """

    def make() -> dict[K, torch.Tensor]:
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
        if not isinstance(py_dict, Mapping):
            raise TypeError(f"py_dict must be a mapping, got {type(py_dict).__name__}")
        tensors = {key: make_tensor(f"py_dict[{key!r}]", value) for key, value in py_dict.items()}
        for key, tensor in tensors.items():
            if reduce_op in ("min", "max") and tensor.is_complex():
                raise ValueError(f"py_dict[{key!r}] is complex, which has no {reduce_op}")
        return tensors

    setting = f"{reduce_op}, to_float={to_float}"
    values = _reduced("all_reduce_dict", group, make, reduce_op, setting, to_float=to_float)
    reduced = {key: value.to(tensor.device, copy=True) for key, tensor, value in values}
    if live_world_size(group) == 1:
        return py_dict
    kind = OrderedDict if isinstance(py_dict, OrderedDict) else dict
    return kind((key, reduced[key]) for key in py_dict)


def all_reduce_dict_in_place(data: dict[Any, Any], op: str = "sum", group: Group = None) -> None:
    """Replace a dict's tensors by their reduction over the ranks; every rank must call this.

    All ranks' dicts must have the same keys, in any order, with the same shapes, dtypes and device
    types. Values keep their dtype; those with the same dtype are sent together. Numbers count as
    tensors, floats as float64. With one process nothing changes.

    Args:
        data: the dict to change.
        op: an operation of ``all_reduce``.

    Raises:
        AssertionError: on every rank, if ``data`` is not a dict on some rank.
        TypeError, ValueError: on every rank; see ``stepwrap.collectives.all_reduce_dict``.
    """

    def make() -> dict[Any, torch.Tensor]:
        checked_op(op)
        if not isinstance(data, dict):
            raise AssertionError(f"data must be a dict, got {type(data).__name__}")
        tensors = {key: make_tensor(f"data[{key!r}]", value) for key, value in data.items()}
        return _check_dtypes("data", tensors, op)

    op = str(op).lower()
    for key, tensor, value in _reduced("dist.all_reduce_dict", group, make, op, repr(op)):
        data[key] = value.to(tensor.device, copy=True)


def all_reduce_params(
    params: Iterable[torch.Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: Group = None,
) -> None:
    """Reduce parameters or buffers over the ranks in place; every rank must call this.

    The number of tensors, their order, shapes and dtypes must be the same on all ranks. A tensor
    that occurs twice is reduced once. With one process an iterator is not consumed.

    Args:
        params: the tensors to reduce.
        coalesce: whether to send the tensors of one dtype together instead of one by one.
        bucket_size_mb: approximate MiB to send at once; -1 sends all tensors of one dtype.
        op: an operation of ``all_reduce``.

    Raises:
        TypeError, ValueError: on every rank, if the operation or size is invalid, an element is
            not a dense tensor or does not support the operation, or the tensors differ.
    """

    def make() -> dict[int, torch.Tensor]:
        checked_op(op)
        if bucket_size_mb != -1 and bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb must be positive or -1, got {bucket_size_mb}")
        if live_world_size(group) == 1:
            return {}
        # Drops tensors given twice, because tensors are hashed by identity.
        tensors = dict(enumerate(dict.fromkeys(params)))
        for index, param in tensors.items():
            if not isinstance(param, torch.Tensor):
                raise TypeError(f"params[{index}] must be a tensor, got {type(param).__name__}")
            tensors[index] = checked_tensor(f"params[{index}]", param).detach()
        return _check_dtypes("params", tensors, op)

    op = str(op).lower()
    setting = f"{op!r} with coalesce={coalesce} and bucket_size_mb={bucket_size_mb}"
    size = bucket_size_mb * _MB if coalesce else 0
    reduced = _reduced("all_reduce_params", group, make, op, setting, size=size, in_place=True)
    for _, tensor, value in reduced:
        if value is not tensor:
            tensor.copy_(value)


def _check_dtypes(name: str, tensors: dict[K, torch.Tensor], op: str) -> dict[K, torch.Tensor]:
    for key, tensor in tensors.items():
        try:
            checked_op(op, tensor.dtype)
        except ValueError as error:
            raise ValueError(f"{name}[{key!r}]: {error}") from error
    return tensors


def _reduced(
    name: str,
    group: Group,
    make: Callable[[], dict[K, torch.Tensor]],
    op: str,
    setting: str,
    *,
    to_float: bool | None = None,
    size: float = -1,
    in_place: bool = False,
) -> Iterator[tuple[K, torch.Tensor, torch.Tensor]]:
    """Yield keys, tensors and results, after all ranks have agreed on the entries.

    Every rank must call this. A result may be part of a larger tensor on another device.

    Args:
        size: approximate number of bytes to send at once; -1 sends all tensors of one dtype.
        in_place: whether a tensor that is sent alone may be overwritten.
    """

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        reduction = Reduction(tensor, op, group, is_wide=to_float is not None)
        reduction.start().wait()
        return reduction.result() if to_float is None else reduction.wide_result(to_float)

    if live_world_size(group) == 1:
        make()
        return
    # Reads the tensors outside of `calling`, because a generator or mapping runs the user's code.
    read_tensors, problem = attempt(make)
    tensors = read_tensors or {}
    entries = {key: describe_tensor(tensor) for key, tensor in tensors.items()}
    with calling(name, group, lambda: list(entries), has_headers=True) as call:
        keys = _agree_on_entries(call, entries, setting, problem)
        for bucket in _buckets(keys, tensors, size):
            bucket_tensors = [tensors[key] for key in bucket]
            if in_place and len(bucket_tensors) == 1:
                yield bucket[0], bucket_tensors[0], reduce(bucket_tensors[0])
                continue
            device = comm_device(group, prefer=bucket_tensors[0].device)
            flat = reduce(torch.cat([t.to(device).reshape(-1) for t in bucket_tensors]))
            reduced_parts = flat.split_with_sizes([t.numel() for t in bucket_tensors])
            for key, tensor, reduced_part in zip(
                bucket, bucket_tensors, reduced_parts, strict=True
            ):
                yield key, tensor, reduced_part.reshape(tensor.shape)


def _buckets(
    keys: Iterable[K], tensors: Mapping[K, torch.Tensor], size: float
) -> Iterator[list[K]]:
    """Yield the keys by dtype and device type, in parts of about ``size`` bytes; -1: one part."""
    kinds: dict[tuple[torch.dtype, str], list[K]] = {}
    for key in keys:
        kinds.setdefault((tensors[key].dtype, tensors[key].device.type), []).append(key)
    for keys_of_kind in kinds.values():
        bucket: list[K] = []
        filled = 0
        for key in keys_of_kind:
            if bucket and 0 <= size < filled + tensors[key].nbytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(key)
            filled += tensors[key].nbytes
        yield bucket


def _agree_on_entries(
    call: Call, entries: Mapping[K, str], setting: str, problem: Exception | None
) -> list[K]:
    """Return the keys in the same order on all ranks; raise on every rank if entries differ."""
    by_text, unclear = attempt(lambda: _sort_by_text(entries))
    texts, problem = by_text or {}, problem or unclear
    in_order = sorted(texts)
    content = repr((setting, [(text, entries[texts[text]]) for text in in_order]))
    # Keys of any other type than `_CLEAR_KEYS` may differ and still have the same text. A random
    # text, which differs from the other ranks' texts, makes all ranks compare the keys themselves.
    is_clear = all(type(key) in _CLEAR_KEYS for key in entries)
    description = dict(entries), setting, call_site()
    text = content if is_clear else uuid.uuid4().hex
    _, answers = agree(call, text, lambda: description, problem=problem)
    if answers is None:
        return [texts[text] for text in in_order]
    by_rank = dict(zip(members(call.group), answers, strict=True))
    settings = differences({rank: {"op": answer[1]} for rank, answer in by_rank.items()})
    difference = settings or differences({rank: answer[0] for rank, answer in by_rank.items()})
    if difference:
        subject = "arguments" if settings else "keys, shapes and dtypes"
        where = describe_places(
            Place(rank, call.name, answer[2]) for rank, answer in by_rank.items()
        )
        raise ValueError(
            f"{call.name}() must get the same {subject} on all ranks, but {difference} ({where})"
        )
    return list(answers[0][0])


def _sort_by_text(entries: Iterable[K]) -> dict[str, K]:
    for key in entries:
        # Two NaNs have the same text, but a dict does not find one by the other.
        if isinstance(key, float) and key != key:
            raise ValueError("the keys must be equal to themselves, got nan")
    return {repr(key): key for key in entries}
