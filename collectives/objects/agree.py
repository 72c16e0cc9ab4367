"""Raising together: a problem of one rank is the same error on all of them."""

import pickle
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from ..errors import CollectiveError, call_site, text_of
from ..process.ranks import members
from .objects import all_gather_object


class Told(NamedTuple):
    """A problem as the other ranks hear of it: they can make the error from it."""

    kind: type[Exception]
    text: str
    site: str


def retell(problem: Exception) -> Told:
    """Return the problem as others hear of it; CollectiveError where they cannot make its type."""
    kind = type(problem)
    try:
        pickle.dumps(kind)
        kind(str(problem))
    # Constructors and local classes fail in many ways.
    except Exception:
        return Told(CollectiveError, text_of(problem), call_site())
    return Told(kind, str(problem), call_site())


def raise_first(
    told: Mapping[int, Told | None], own: Exception | None = None, what: str = ""
) -> None:
    """Raise the problem of the first rank that has one; the type is the same on all ranks.

    Args:
        told: each rank's problem, by rank, the same on all ranks.
        own: this rank's problem, which becomes the cause.
    """
    for rank, problem in told.items():
        if problem is not None:
            raise problem.kind(f"{what}on rank {rank} ({problem.site}): {problem.text}") from own


def raise_together(
    problem: Exception | None, group: dist.ProcessGroup | None = None, what: str = ""
) -> None:
    """Raise on every rank what is wrong on any of them; every rank must call this.

    The type is that of the first rank with a problem; CollectiveError where the others cannot make
    that type from a text.
    """
    told = all_gather_object(None if problem is None else retell(problem), group)
    raise_first(dict(zip(members(group), told, strict=True)), problem, what)
