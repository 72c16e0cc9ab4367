"""What must be the same on all ranks, found out before they wait for each other in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ...collectives import all_gather_object, distributed_available, get_rank, run_together
from .first_rank import routes


def agree(describe: Callable[[], Mapping[str, Any]], mesh: DeviceMesh | None = None) -> None:
    """Raise on all ranks what ``describe`` raises on one, or ValueError where its results differ.

    Every rank of the mesh must call this. The ranks send each other one object for each axis.

    Args:
        describe: what is compared, by a name for the message; values that can be pickled.
        mesh: the ranks; default: all.
    """
    reports, failures, own = run_together(
        lambda: (get_rank(), dict(describe())), lambda report: _gather(report, mesh)
    )
    if own is not None and len({failure and failure.told for failure in failures}) == 1:
        raise own
    for failure in filter(None, failures):
        raise failure.kind(f"on rank {failure.rank}: {failure.text}") from own
    _compare(reports)


def _gather(own: Any, mesh: DeviceMesh | None) -> list[Any]:
    if mesh is None or not distributed_available():
        return all_gather_object(own)
    known = {get_rank(): own}
    for group, _ in routes(mesh):
        known = {
            rank: one for part in all_gather_object(known, group) for rank, one in part.items()
        }
    return [known[rank] for rank in sorted(known)]


def _compare(reports: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    (first_rank, first), *others = reports
    for rank, other in others:
        for name in [*first, *other]:
            here, there = first.get(name, "absent"), other.get(name, "absent")
            if here != there:
                raise ValueError(
                    "model and options must be the same on all ranks, but "
                    f"{name!r} is {here} on rank {first_rank} and {there} on rank {rank}"
                )
