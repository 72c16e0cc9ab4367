"""Raise an error of one rank on every rank."""

import pickle
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, attempt, call_site, get_text
from ..process.ranks import distributed_available
from ..trace.headers import Header, exchange_headers
from .objects import all_gather_object

T = TypeVar("T")


class Failure(NamedTuple):
    """The description of one rank's error that is sent to the other ranks.

    Attributes:
        rank: the rank that failed.
        kind: the type to raise: the type of the error if it can be built from a text, otherwise
            CollectiveError.
        text: the text of the error.
        full_text: type and text of the error.
        site: "file:line" of the failed call.
    """

    rank: int
    kind: type[Exception]
    text: str
    full_text: str
    site: str


def failure_of(problem: Exception | None, rank: int | None = None) -> Failure | None:
    """Return a description of this rank's error for other ranks, None if it has none.

    Args:
        problem: the error, or None.
        rank: this rank's number; default: the rank in the default group.
    """
    if problem is None:
        return None
    if rank is None:
        rank = dist.get_rank() if distributed_available() else 0
    kind, full_text = type(problem), get_text(problem)
    try:
        pickle.dumps(kind)
        kind(str(problem))
    # Constructors, and pickling of local classes, fail in many ways.
    except Exception:
        return Failure(rank, CollectiveError, full_text, full_text, call_site())
    return Failure(rank, kind, str(problem), full_text, call_site())


def raise_first(
    failures: Sequence[Failure | None], cause: Exception | None = None, prefix: str = ""
) -> None:
    """Raise the first of the ranks' failures, if any; its cause is this rank's error ``cause``."""
    for failure in failures:
        if failure is not None:
            text = f"{prefix}on rank {failure.rank} ({failure.site}): {failure.text}"
            raise failure.kind(text) from cause


def run_together(
    action: Callable[[], T], gather: Callable[[Any], list[Any]] = all_gather_object
) -> tuple[list[T], list[Failure | None], Exception | None]:
    """Run ``action`` and exchange results and errors; every rank must call this.

    Args:
        action: a function whose result is picklable.
        gather: function that returns the objects of all ranks, given this rank's object.

    Returns:
        A list with each rank's result, or None if it failed; a list with each rank's failure, or
        None; and this rank's exception, or None. If there is a failure, the caller should raise an
        error from this exception.
    """
    result, problem = attempt(action)
    reports = gather((result, failure_of(problem)))
    return [value for value, _ in reports], [failure for _, failure in reports], problem


def results_of_all(action: Callable[[], T], group: Group = None, prefix: str = "") -> list[T]:
    """Run ``action`` and return the results of all ranks; raise on every rank if one fails.

    Every rank must call this.
    """
    results, failures, problem = run_together(
        action, lambda report: all_gather_object(report, group)
    )
    raise_first(failures, problem, prefix)
    return results


def agree(
    call: Call,
    text: str,
    details: Callable[[], T],
    *,
    problem: Exception | None = None,
    inline: Sequence[bytes | memoryview] = (),
) -> tuple[list[Header], list[T] | None]:
    """Compare a text between ranks by its digest, and send ``inline`` in the same message.

    Every rank must call this. It returns the headers of all ranks, and the results of ``details``
    of all ranks if the texts differ, otherwise None. If ranks have a ``problem``, every rank raises
    the first one.
    """
    # A rank with a problem sends a random text, which differs from all others, so all ranks
    # exchange details. Instead of details, this rank reports its problem.
    headers = exchange_headers(call, agreed=uuid.uuid4().hex if problem else text, inline=inline)
    if len({header.agreed for header in headers}) == 1:
        return headers, None

    def answer() -> T:
        if problem is not None:
            raise problem
        return details()

    return headers, results_of_all(answer, call.group, f"{call.name}() ")
