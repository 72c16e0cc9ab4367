"""Agreeing on what is about to be reduced: keys, shapes and dtypes, with one small message."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .agree import raise_together
from .objects import all_gather_object
from .process import comm_device, live_world_size, members

K = TypeVar("K", bound=Hashable)
_SHOWN = 5
_CLEAR_KEYS = (str, int, float, bool, bytes, type(None))


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype, shape and kind of device in words."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return all ranks' numbers; every rank must pass equally many, each below 2**63."""
    own = torch.tensor(numbers, dtype=torch.int64, device=comm_device(group))
    rows = [torch.empty_like(own) for _ in range(live_world_size(group))]
    dist.all_gather(rows, own, group)
    gathered: list[list[int]] = torch.stack(rows).tolist()
    return gathered


def agree_on_entries(
    name: str,
    entries: Mapping[K, str],
    group: dist.ProcessGroup | None,
    *,
    setting: str,
    problem: Exception | None = None,
) -> list[K]:
    """Return the keys in one order for all ranks; every rank must call this.

    Digests are exchanged; the entries themselves only when these differ or do not say enough.

    Args:
        name: the function that the user has called.
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
    content = repr((name, setting, [(text, entries[texts[text]]) for text in in_order]))
    digest = hashlib.blake2b(content.encode(errors="replace"), digest_size=8).digest()
    own = [int(is_clear), int.from_bytes(digest, "little", signed=True)]
    rows = gather_numbers(own, group)
    if is_clear and all(row == own for row in rows):
        return [texts[text] for text in in_order]
    answers = all_gather_object((dict(entries), setting, problem is None), group)
    if not all(answer[2] for answer in answers):
        raise_together(problem, group)
    _compare(name, "arguments", [{"op": answer[1]} for answer in answers], group)
    _compare(name, "keys, shapes and dtypes", [answer[0] for answer in answers], group)
    return list(answers[0][0])


def _compare(
    name: str, what: str, answers: Sequence[Mapping[Any, str]], group: dist.ProcessGroup | None
) -> None:
    ranks = members(group)
    differences = []
    for key in dict.fromkeys(key for answer in answers for key in answer):
        texts: dict[str, list[int]] = {}
        for rank, answer in zip(ranks, answers, strict=True):
            texts.setdefault(answer.get(key, "missing"), []).append(rank)
        if len(texts) > 1:
            where = (f"{text} on rank {', '.join(map(str, on))}" for text, on in texts.items())
            differences.append(f"{key!r} is {' and '.join(where)}")
    if differences:
        more = len(differences) - _SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ValueError(
            f"{name}() must get the same {what} on all ranks, but "
            f"{'; '.join(differences[:_SHOWN])}{rest}"
        )
