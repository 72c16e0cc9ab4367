"""As many batches on every rank, where a step needs them all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import TorchDist, comm_device
from .data import batches_from, length_of

_END = object()


def even_batches(
    loader: Iterable[Any], group: dist.ProcessGroup | None, what: str = "loader"
) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, each with True, and fillers with False.

    Every rank of `group` gets equally many items. A rank that has run out sees its last batch
    again; one that never had any gets one of another rank. The ranks agree at the start where
    all loaders have a length, and at each batch otherwise.

    Raises:
        ValueError: On every rank, when there is no batch on any; on one whose loader has more
            batches than it said.
    """
    own = iter(batches_from(loader, epoch=0))
    batch = next(own, _END)
    ranks = TorchDist(group)
    told = ranks.all_gather_object((length_of(loader), batch is not _END))
    has = [some for _, some in told]
    if not any(has):
        raise ValueError(f"the {what} has no batches on any rank")
    last = batch
    if not all(has):
        lent = ranks.broadcast_object(batch if has[ranks.rank] else None, has.index(True))
        last = batch if batch is not _END else lent
    lengths = [length for length, _ in told if length is not None]
    rounds = max(lengths) if len(lengths) == len(told) else None
    count = 0
    while True:
        yield last, batch is not _END
        count += 1
        batch = next(own, _END)
        last = batch if batch is not _END else last
        if rounds is None:
            if not _any(batch is not _END, group):
                return
        elif count >= rounds:
            if batch is not _END:
                raise ValueError(
                    f"{type(loader).__name__} has more batches than its length of "
                    f"{length_of(loader)}"
                )
            return


def _any(mine: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank says True; every rank of the group must call this."""
    flag = torch.tensor(int(mine), device=comm_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())
