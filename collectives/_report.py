"""After a failure: ranks tell each other through the group's store where they are."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist

from . import trace
from ._story import Call, Place, call_site, tell
from .errors import CollectiveError
from .process import members

# Ranks that wait for each other fail within moments of each other.
_PATIENCE_S = 1.0
_POLL_S = 0.02


@dataclass
class _Past:
    """What earlier failures under one default group have left, by key in its store.

    Attributes:
        posted: what this rank has told.
        silent: of whom nothing was heard; they are not waited for again.
    """

    posted: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)


_pasts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Past] = weakref.WeakKeyDictionary()


def failure(call: Call, error: BaseException) -> CollectiveError:
    """Return the error to raise, after asking where the other ranks are."""
    rank, ranks = dist.get_rank(), members(call.group)
    own = Place(rank, call.name, call_site(), call.structure())
    try:
        places, elsewhere = _ask(own, ranks, call.group)
    # The store may have died with the process that served it.
    except RuntimeError:
        places, elsewhere = [own], {r: "cannot be asked" for r in ranks if r != rank}
    return CollectiveError(
        f"{call.name}() must be reached by all {len(ranks)} ranks, but did not finish on rank "
        f"{rank}: {tell(places, elsewhere)}. The transport "
        f"({dist.get_backend_config(call.group)}) says: {error}"
    )


def withdraw(group: dist.ProcessGroup | None) -> None:
    """After a success, take back what an earlier failure has told the others."""
    if _pasts and _past().posted:
        key = _key(group, dist.get_rank())
        if key in _past().posted:
            _past().posted.discard(key)
            _store().delete_key(key)


def _ask(
    own: Place, ranks: list[int], group: dist.ProcessGroup | None
) -> tuple[list[Place], dict[int, str]]:
    """Return where the ranks that failed too are, and what is known of the others."""
    store = _store()
    own_key = _key(group, own.rank)
    store.set(own_key, own.encode().decode())
    past = _past()
    past.posted.add(own_key)
    places = {own.rank: own}
    keys = {rank: _key(group, rank) for rank in ranks if rank != own.rank}
    question = trace.ask(store) if trace.is_tracing() else None
    answers: dict[int, str] = {}
    deadline = time.monotonic() + _PATIENCE_S + (trace.ANSWER_S if question else 0.0)
    while True:
        for rank, key in keys.items():
            if rank not in places and store.check([key]):
                places[rank] = Place.decode(store.get(key))
        if question:
            answers |= trace.answers(store, question, [r for r in keys if r not in answers])
        waited_for = {key for r, key in keys.items() if r not in places and r not in answers}
        if waited_for <= past.silent or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    past.silent.update(waited_for)
    silent = "does not answer: it has died or is stuck" if question else "has not come"
    return list(places.values()), {r: answers.get(r, silent) for r in keys if r not in places}


def _past() -> _Past:
    assert dist.group.WORLD is not None
    return _pasts.setdefault(dist.group.WORLD, _Past())


def _store() -> trace.Store:
    assert dist.group.WORLD is not None
    store: trace.Store = dist.group.WORLD.get_group_store()
    return store


def _key(group: dist.ProcessGroup | None, rank: int) -> str:
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return f"stepwrap/failed/{name}/{rank}"
