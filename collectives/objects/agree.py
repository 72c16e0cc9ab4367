"""An error of one rank, raised on every rank."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import CollectiveError, call_site, text_of
from ..process.ranks import distributed_available
from .objects import all_gather_object

T = TypeVar("T")


class Failure(NamedTuple):
    """An error of one rank as the others receive it.

    Attributes:
        rank: where it was raised.
        kind: its type; CollectiveError where the other ranks cannot make that from a text.
        text: what an error of that kind says.
        told: the name of its own type, and its text.
        site: "file:line" of the call that has failed.
    """

    rank: int
    kind: type[Exception]
    text: str
    told: str
    site: str


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result, or the error for the other ranks, which are waiting to hear of it."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def failure_of(problem: Exception | None, rank: int | None = None) -> Failure | None:
    """Return what this rank sends the others of its problem, None where it has none.

    Args:
        rank: this rank's number, where that is not the one in the default group.
    """
    if problem is None:
        return None
    if rank is None:
        rank = dist.get_rank() if distributed_available() else 0
    kind, told = type(problem), text_of(problem)
    try:
        pickle.dumps(kind)
        kind(str(problem))
    # Constructors and local classes fail in many ways.
    except Exception:
        return Failure(rank, CollectiveError, told, told, call_site())
    return Failure(rank, kind, str(problem), told, call_site())


def raise_first(
    failures: Sequence[Failure | None], own: Exception | None = None, what: str = ""
) -> None:
    """Raise the failure of the first rank that has one; the type is the same on every rank.

    Args:
        failures: that of each rank, the same on every rank.
        own: this rank's problem, which becomes the cause.
    """
    for failure in failures:
        if failure is not None:
            text = f"{what}on rank {failure.rank} ({failure.site}): {failure.text}"
            raise failure.kind(text) from own


def raise_together(
    problem: Exception | None, group: dist.ProcessGroup | None = None, what: str = ""
) -> None:
    """Raise on every rank what is wrong on any of them; every rank must call this.

    The type is that of the first rank with a problem; CollectiveError where the others cannot make
    that type from a text.
    """
    raise_first(all_gather_object(failure_of(problem), group), problem, what)


def run_together(
    action: Callable[[], T], gather: Callable[[Any], list[Any]] = all_gather_object
) -> tuple[list[T], list[Failure | None], Exception | None]:
    """Run `action` and tell every rank how it went on all of them; every rank must call this.

    Args:
        action: its results must be picklable.
        gather: exchanges an object with the other ranks.

    Returns:
        Each rank's result, which is None where it failed; each rank's failure or None; and the
        exception of this rank, the cause of the error that the caller is to raise.
    """
    result, own = attempt(action)
    reports = gather((result, failure_of(own)))
    return [one for one, _ in reports], [failure for _, failure in reports], own
