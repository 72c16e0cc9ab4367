"""After a failure: ranks tell each other through the group's store where they are."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist

from ..errors import CollectiveError, Place, tell
from ..process.ranks import members
from . import tracing as trace

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


def failure(
    own: Place, group: dist.ProcessGroup | None, error: BaseException, *, is_call: bool = True
) -> CollectiveError:
    """Return the error to raise, after asking where the other ranks are.

    Args:
        own: where this rank was when `error` came.
        is_call: whether `own.call` is a function, rather than what a loop is doing.
    """
    ranks = members(group)
    places, elsewhere = _ask_in_time(own, ranks, group)
    said = f"The transport ({dist.get_backend_config(group)}) says: {error}"
    title, needs = (f"{own.call}()", "must be reached by") if is_call else (own.call, "needs")
    if not elsewhere and len({(place.call, place.detail) for place in places}) == 1:
        return CollectiveError(f"{title} failed on all ranks: {tell(places)}. {said}")
    return CollectiveError(
        f"{title} {needs} all {len(ranks)} ranks, but did not finish on rank {own.rank}: "
        f"{tell(places, elsewhere)}. {said}"
    )


def withdraw(group: dist.ProcessGroup | None) -> None:
    """After a success, take back what an earlier failure has told the others."""
    if _pasts and _past().posted:
        _past().silent.clear()
        key = _key(group, dist.get_rank())
        if key in _past().posted:
            _past().posted.discard(key)
            _store().delete_key(key)


_Known: TypeAlias = "tuple[list[Place], dict[int, str]]"


def _ask_in_time(own: Place, ranks: list[int], group: dist.ProcessGroup | None) -> _Known:
    """Return what `_ask` does, also when the store's process has died or been stopped."""
    known: list[_Known] = []
    question = trace.is_answering()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            known.append(_ask(own, ranks, group))

    asking = threading.Thread(target=ask, name="stepwrap-report", daemon=True)
    asking.start()
    asking.join(2 * _PATIENCE_S + (trace.ANSWER_S if question else 0.0))
    if known:
        return known[0]
    others = {rank: "cannot be asked" for rank in ranks if rank != own.rank}
    if _is_served_by_rank_0() and 0 in others:
        others[0] = "does not answer, nor does the store that it serves: it is stuck or stopped"
    return [own], others


def _ask(own: Place, ranks: list[int], group: dist.ProcessGroup | None) -> _Known:
    """Return where the ranks that failed too are, and what is known of the others."""
    store, past = _store(), _past()
    own_key = _key(group, own.rank)
    store.set(own_key, own.encode().decode())
    past.posted.add(own_key)
    places = {own.rank: own}
    keys = {rank: _key(group, rank) for rank in ranks if rank != own.rank}
    question = trace.ask(store) if trace.is_answering() else None
    answers: dict[int, str] = {}
    started = time.monotonic()
    patience = _PATIENCE_S + (trace.ANSWER_S if question else 0.0)
    while True:
        for rank, key in keys.items():
            if rank not in places and store.check([key]):
                places[rank] = Place.decode(store.get(key))
        if question:
            answers |= trace.answers(store, question, [r for r in keys if r not in answers])
        waited_for = {key for r, key in keys.items() if r not in places and r not in answers}
        waited_s = time.monotonic() - started
        if waited_for <= past.silent and (not question or waited_s > _PATIENCE_S):
            break
        if not waited_for or waited_s > patience:
            break
        time.sleep(_POLL_S)
    past.silent.update(waited_for)
    silent = (
        "does not answer: it has died, is stuck, has been stopped or has not begun"
        if question
        else "has not come"
    )
    # Who failed long ago waits no more, and may be anywhere.
    gone = {
        rank: f"gave up in {place.call} ({place.site}) {own.when - place.when:.0f} s ago"
        for rank, place in places.items()
        if own.when - place.when > _PATIENCE_S
    }
    others = {r: answers.get(r, silent) for r in keys if r not in places}
    return [place for r, place in places.items() if r not in gone], others | gone


def _past() -> _Past:
    assert dist.group.WORLD is not None
    return _pasts.setdefault(dist.group.WORLD, _Past())


def _store() -> trace.Store:
    assert dist.group.WORLD is not None
    store: trace.Store = dist.group.WORLD.get_group_store()
    return store


def _is_served_by_rank_0() -> bool:
    """Return whether the store is as torch makes it by default, without an agent of torchrun."""
    store = _store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and not has_agent  # type: ignore[attr-defined]


def _key(group: dist.ProcessGroup | None, rank: int) -> str:
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return f"stepwrap/failed/{name}/{rank}"
