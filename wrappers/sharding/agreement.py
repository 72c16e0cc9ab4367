"""What must be the same on all ranks, found out before they wait for each other in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ...collectives import all_gather_object, get_rank
from .first_rank import routes


class _Report(NamedTuple):
    """What one rank has found: what is to be compared, or an error."""

    found: dict[str, Any]
    kind: type[Exception] | None = None
    text: str = ""


def agree(describe: Callable[[], Mapping[str, Any]], mesh: DeviceMesh | None = None) -> None:
    """Raise on all ranks what ``describe`` raises on one, or ValueError where its results differ.

    Every rank of the mesh must call this. The ranks send each other one object for each axis.

    Args:
        describe: what is compared, by a name for the message; values that can be pickled.
        mesh: the ranks; default: all.
    """
    problem: Exception | None = None
    own = _Report({})
    try:
        own = _Report(dict(describe()))
    # Whatever it is, the others must not wait for this rank.
    except Exception as error:  # noqa: BLE001
        problem, own = error, _report(error)
    reports = _gather(own, mesh)
    if problem is not None and all(report[1:] == own[1:] for report in reports.values()):
        raise problem
    for rank, report in reports.items():
        if report.kind is not None:
            raise report.kind(f"on rank {rank}: {report.text}") from problem
    _compare(reports)


def _report(error: Exception) -> _Report:
    """What others can raise: the class of the user's own errors may not be known to them."""
    kind = type(error)
    for known in (ValueError, TypeError, AssertionError):
        if isinstance(error, known):
            return _Report({}, known, str(error))
    return _Report({}, RuntimeError, f"{kind.__name__}: {error}")


def _gather(own: _Report, mesh: DeviceMesh | None) -> dict[int, _Report]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return {0: own}
    if mesh is None:
        return dict(enumerate(all_gather_object(own)))
    known = {get_rank(): own}
    for group, _ in routes(mesh):
        known = {
            rank: one for part in all_gather_object(known, group) for rank, one in part.items()
        }
    return dict(sorted(known.items()))


def _compare(reports: Mapping[int, _Report]) -> None:
    (first_rank, first), *others = reports.items()
    for rank, other in others:
        for name in [*first.found, *other.found]:
            here, there = first.found.get(name, "absent"), other.found.get(name, "absent")
            if here != there:
                raise ValueError(
                    "model and options must be the same on all ranks, but "
                    f"{name!r} is {here} on rank {first_rank} and {there} on rank {rank}"
                )
