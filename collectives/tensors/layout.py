"""Agreeing on what is about to be sent: keys, shapes and dtypes, with one small message."""

import contextlib
import numbers
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import Call, Place, call_site, name_ranks, tell, text_of
from ..objects.agree import failure_of, raise_first
from ..objects.objects import all_gather_object
from ..process.ranks import members
from ..trace.calling import calling
from ..trace.tracing import is_tracing
from ..transport.first_message import meet
from .operations import check_reduced

K = TypeVar("K", bound=Hashable)
_SHOWN = 5
_CLEAR_KEYS = (str, int, float, bool, bytes, type(None))


def describe_tensor(data: object) -> str:
    """Return dtype, shape, kind of device and any odd layout in words; else the type."""
    if not isinstance(data, torch.Tensor):
        return type(data).__name__
    layout = "" if data.layout == torch.strided else f" ({data.layout})"
    return f"{data.dtype} of shape {tuple(data.shape)} on {data.device.type}{layout}"


def checked_tensor(name: str, data: object) -> torch.Tensor:
    """Return the data, a tensor in plain memory.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has no values or another layout.
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
    if data.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if data.layout != torch.strided or data.is_nested:
        what = "a nested tensor" if data.is_nested else data.layout
        raise ValueError(f"{name} must be a dense (torch.strided) tensor, got {what}")
    if data.is_quantized:
        raise ValueError(f"{name} must not be quantized, got {data.dtype}")
    return data


def is_number(value: object) -> bool:
    """Return whether it is a number, also one of NumPy, whose bool is not registered as one."""
    kind = type(value)
    is_numpy_flag = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return isinstance(value, numbers.Number) or is_numpy_flag


def tensor_of(name: str, value: object) -> torch.Tensor:
    """Return a detached tensor that can be reduced; a Python float becomes float64.

    Raises:
        TypeError: it is no tensor and no number.
        ValueError: it cannot be a tensor, or one that is not dense or of such a dtype.
    """
    if not isinstance(value, torch.Tensor) and not is_number(value):
        what = type(value).__name__
        raise TypeError(f"{name} must be a tensor or a number, got {what}")
    dtype = torch.float64 if isinstance(value, float) else None
    try:
        tensor = torch.as_tensor(value, dtype=dtype).detach()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} must fit a tensor, got {value}: {error}") from error
    checked_tensor(name, tensor)
    check_reduced(tensor.dtype)
    return tensor


@contextlib.contextmanager
def checking(
    name: str, group: dist.ProcessGroup | None, describe: Callable[[], str]
) -> Iterator[None]:
    """Surround what a rank does alone before a call that begins with no message.

    Its errors are raised on that rank only, unless calls are traced: then all ranks hear of them
    in the meeting that comes before such a call.
    """
    try:
        yield
    except Exception as error:
        if is_tracing() and len(members(group)) > 1:
            text = f"{describe()}, refused by {text_of(error)}"
            with calling(name, group, lambda: text):
                # All ranks refuse the same: then each raises its own.
                pass
        raise


def buckets(
    keys: Iterable[K], tensors: Mapping[K, torch.Tensor], size: float = -1
) -> Iterator[list[K]]:
    """Yield the keys by (dtype, kind of device), in parts of about `size` bytes; -1 is all."""
    kinds: dict[tuple[torch.dtype, str], list[K]] = {}
    for key in keys:
        kinds.setdefault((tensors[key].dtype, tensors[key].device.type), []).append(key)
    for members_of_kind in kinds.values():
        bucket: list[K] = []
        filled = 0
        for key in members_of_kind:
            if bucket and 0 <= size < filled + tensors[key].nbytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(key)
            filled += tensors[key].nbytes
        yield bucket


def agree_on_entries(
    call: Call, entries: Mapping[K, str], *, setting: str, problem: Exception | None = None
) -> list[K]:
    """Return the keys in one order for all ranks; every rank must call this.

    Digests are exchanged; the entries themselves only when these differ or do not say enough.

    Args:
        call: what the user has called.
        entries: what is to be reduced, in words, by key; in any order.
        setting: the other arguments, which must be equal too.
        problem: why this rank cannot go on.

    Raises:
        ValueError: on every rank, entries or settings that differ.
        Exception: on every rank, the problem of the first rank that has one.
    """
    texts, problem = _by_text(entries, problem)
    # Of any other key the text may not tell which one it is.
    is_clear = problem is None and all(type(key) in _CLEAR_KEYS for key in entries)
    in_order = sorted(texts)
    content = repr((setting, [(text, entries[texts[text]]) for text in in_order]))
    # What is not clear is unlike anything, so that all ranks go into the details.
    headers = meet(call, agreed=content if is_clear else uuid.uuid4().hex)
    if len({header.agreed for header in headers}) == 1:
        return [texts[text] for text in in_order]
    shown = {} if problem else dict(entries)
    answers = all_gather_object((shown, setting, failure_of(problem), call_site()), call.group)
    by_rank = dict(zip(members(call.group), answers, strict=True))
    raise_first([answer[2] for answer in answers], problem, f"{call.name}() ")
    sites = {rank: answer[3] for rank, answer in by_rank.items()}
    _compare(call.name, "arguments", {r: {"op": a[1]} for r, a in by_rank.items()}, sites)
    _compare(call.name, "keys, shapes and dtypes", {r: a[0] for r, a in by_rank.items()}, sites)
    return list(answers[0][0])


def _by_text(
    entries: Mapping[K, str], problem: Exception | None
) -> tuple[dict[str, K], Exception | None]:
    """Return the keys by their text, and what is wrong with one of them."""
    try:
        for key in entries:
            # Two of these look the same, and no copy of one is found in a dict.
            if isinstance(key, float) and key != key:
                raise ValueError("the keys must be equal to themselves, got nan")
        return {repr(key): key for key in entries}, problem
    # Whatever a key's __repr__ raises, the other ranks are waiting.
    except Exception as error:
        return {}, problem or error


def _compare(
    name: str,
    what: str,
    answers: Mapping[int, Mapping[K, str]],
    sites: Mapping[int, str],
) -> None:
    """Raise what differs between the ranks' answers, if anything does."""
    differences: list[str] = []
    missing: dict[tuple[int, ...], list[K]] = {}
    for key in dict.fromkeys(key for answer in answers.values() for key in answer):
        lacking = tuple(rank for rank, answer in answers.items() if key not in answer)
        if lacking:
            missing.setdefault(lacking, []).append(key)
        texts: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            if key in answer:
                texts.setdefault(answer[key], []).append(rank)
        if len(texts) > 1:
            where = (f"{text} on {name_ranks(ranks)}" for text, ranks in texts.items())
            differences.append(f"{key!r} is {' and '.join(where)}")
    for ranks, keys in missing.items():
        differences.append(f"keys missing on {name_ranks(ranks)}: {_shorten(map(str, keys), ', ')}")
    if differences:
        places = (Place(rank, name, site) for rank, site in sites.items())
        raise ValueError(
            f"{name}() must get the same {what} on all ranks, but "
            f"{_shorten(differences, '; ')} ({tell(places)})"
        )


def _shorten(texts: Iterable[str], separator: str) -> str:
    texts = list(texts)
    more = len(texts) - _SHOWN
    return separator.join(texts[:_SHOWN] + ([f"and {more} more"] if more > 0 else []))
