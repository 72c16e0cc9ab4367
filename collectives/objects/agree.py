"""An error of one rank, raised on every rank."""

import pickle
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import Call, CollectiveError, Group, attempt, call_site, text_of
from ..process.ranks import distributed_available
from ..trace.first_message import Header, meet
from .objects import all_gather_object

T = TypeVar("T")


class Failure(NamedTuple):
    """An error of one rank: its type as the others can raise it, its text, and where it came."""

    rank: int
    kind: type[Exception]
    text: str
    told: str
    site: str


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
    """Raise the failure of the first rank that has one; `own`, this rank's, becomes the cause."""
    for failure in failures:
        if failure is not None:
            text = f"{what}on rank {failure.rank} ({failure.site}): {failure.text}"
            raise failure.kind(text) from own


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


def results_of_all(action: Callable[[], T], group: Group = None, what: str = "") -> list[T]:
    """Run `action` and return all ranks' results, or raise on every rank what failed on one."""
    results, failures, own = run_together(action, lambda own: all_gather_object(own, group))
    raise_first(failures, own, what)
    return results


def agree(
    call: Call,
    text: str,
    details: Callable[[], T],
    *,
    problem: Exception | None = None,
    pieces: Sequence[bytes | memoryview] = (),
) -> tuple[list[Header], list[T] | None]:
    """Compare a text over the ranks by its digest, and send `pieces` along in the first message.

    Returns all ranks' headers, and None where the texts are equal, else what `details` returns on
    each rank. The problem of the first rank that has one is raised on every rank.
    """
    # A problem is unlike anything, so that all ranks go into the details.
    headers = meet(call, agreed=uuid.uuid4().hex if problem else text, pieces=pieces)
    if len({header.agreed for header in headers}) == 1:
        return headers, None

    def answer() -> T:
        if problem is not None:
            raise problem
        return details()

    return headers, results_of_all(answer, call.group, f"{call.name}() ")
