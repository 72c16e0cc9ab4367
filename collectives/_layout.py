"""Agreeing on what is about to be reduced: keys, shapes and dtypes, with one small message."""

import uuid
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from ._meeting import meet
from ._story import Call, Place, call_site, name_ranks, tell
from .agree import raise_first, retell
from .objects import all_gather_object
from .process import members

K = TypeVar("K", bound=Hashable)
_SHOWN = 5
_CLEAR_KEYS = (str, int, float, bool, bytes, type(None))


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype, shape and kind of device in words."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"


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
    texts = {repr(key): key for key in entries}
    # Of any other key the text may not tell which one it is.
    is_clear = problem is None and all(type(key) in _CLEAR_KEYS for key in entries)
    in_order = sorted(texts)
    content = repr((setting, [(text, entries[texts[text]]) for text in in_order]))
    # What is not clear is unlike anything, so that all ranks go into the details.
    headers = meet(call, agreed=content if is_clear else uuid.uuid4().hex)
    if len({header.agreed for header in headers}) == 1:
        return [texts[text] for text in in_order]
    told = None if problem is None else retell(problem)
    answers = all_gather_object((dict(entries), setting, told, call_site()), call.group)
    by_rank = dict(zip(members(call.group), answers, strict=True))
    raise_first({r: answer[2] for r, answer in by_rank.items()}, problem, f"{call.name}() ")
    sites = {rank: answer[3] for rank, answer in by_rank.items()}
    _compare(call.name, "arguments", {r: {"op": a[1]} for r, a in by_rank.items()}, sites)
    _compare(call.name, "keys, shapes and dtypes", {r: a[0] for r, a in by_rank.items()}, sites)
    return list(answers[0][0])


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
