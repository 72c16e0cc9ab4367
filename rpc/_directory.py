"""What the manager of a world knows: who holds which key, who waits for whom, who is gone.

It lives on rank 0 and nowhere waits: whoever meets others gets a future, which the last one to come
completes. All methods are called from the transport's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Any, Literal, NamedTuple

from torch.futures import Future

from .errors import RpcError

Kind = Literal["value", "service"]


class Entry(NamedTuple):
    """Who holds a key.

    Attributes:
        holder: its name.
        is_async: whether the service answers by a future.
    """

    holder: str
    is_async: bool


class Directory:
    """The tables of a world.

    Args:
        names: all members.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._entries: dict[tuple[Kind, str, Hashable], Entry] = {}
        self._rounds: dict[Hashable, list[_Round]] = {}
        self._living = set(names)
        self._gone: set[str] = set()
        self._lock = threading.Lock()

    def add(self, kind: Kind, group: str, key: Hashable, entry: Entry) -> bool:
        """Note the holder of a key; False where the key is taken."""
        with self._lock:
            if entry.holder in self._gone:
                raise RpcError(f"{entry.holder!r} is held to be gone")
            return self._entries.setdefault((kind, group, key), entry) is entry

    def remove(self, kind: Kind, group: str, key: Hashable, holder: str) -> bool:
        """Forget a key; False where `holder` does not hold it."""
        with self._lock:
            entry = self._entries.get((kind, group, key))
            if entry is None or entry.holder != holder:
                return False
            del self._entries[kind, group, key]
            return True

    def find(self, kind: Kind, group: str, key: Hashable) -> Entry | None:
        """Return who holds a key, None where nobody does."""
        with self._lock:
            return self._entries.get((kind, group, key))

    def withdraw(self, group: str, holder: str) -> None:
        """Forget everything that `holder` holds in a group."""
        with self._lock:
            self._forget(lambda name, entry: name == group and entry.holder == holder)

    def meet(self, place: Hashable, name: str, members: tuple[str, ...]) -> Future[list[str]]:
        """Arrive at a place; the future is complete when all living members have arrived.

        Its value is the names of those that never will, being gone. A name that arrives twice is
        counted in the next round.

        Raises:
            ValueError: in all who are there, when they expect different members.
        """
        future: Future[list[str]] = Future()
        with self._lock:
            rounds = self._rounds.setdefault(place, [])
            found = next((one for one in rounds if name not in one.arrived), None)
            if found is None:
                found = _Round(members)
                rounds.append(found)
            others = _list(found.arrived)
            found.arrived[name] = future
            differs = set(found.members) != set(members)
            if differs:
                rounds.remove(found)
            complete = self._take_complete()
        _release(complete)
        if differs:
            text = (
                f"{name!r} names the members {_list(members)}, "
                f"{others} the members {_list(found.members)}"
            )
            for waiting in found.arrived.values():
                waiting.set_exception(ValueError(text))  # type: ignore[arg-type]
        return future

    def give_up(self, place: Hashable, name: str) -> list[str]:
        """Leave a place where one has waited too long; return who had not arrived."""
        with self._lock:
            rounds = self._rounds.get(place, [])
            found = next((one for one in rounds if name in one.arrived), None)
            if found is None:
                return []
            waiting = found.arrived.pop(name)
            missing = [one for one in found.members if one not in found.arrived and one != name]
            if not found.arrived:
                rounds.remove(found)
        # Nobody reads the answer, but while it is owed the transport cannot be freed.
        waiting.set_result([])
        return missing

    def note_gone(self, name: str) -> None:
        """Forget a process that has ended, and release those who wait for it."""
        with self._lock:
            if name not in self._living:
                return
            self._living.discard(name)
            self._gone.add(name)
            self._forget(lambda _, entry: entry.holder == name)
            for rounds in self._rounds.values():
                for one in rounds:
                    one.arrived.pop(name, None)
            complete = self._take_complete()
        _release(complete)

    def gone(self) -> list[str]:
        """Return the names of those that have ended without leaving."""
        with self._lock:
            return sorted(self._gone)

    def _forget(self, concerns: Any) -> None:
        for place in [place for place, entry in self._entries.items() if concerns(place[1], entry)]:
            del self._entries[place]

    def _take_complete(self) -> list[tuple[_Round, list[str]]]:
        """Take out the rounds that wait for nobody any more, each with those that are gone."""
        complete = []
        for place in list(self._rounds):
            for one in list(self._rounds[place]):
                if all(name in one.arrived or name in self._gone for name in one.members):
                    self._rounds[place].remove(one)
                    complete.append((one, [name for name in one.members if name in self._gone]))
            if not self._rounds[place]:
                del self._rounds[place]
        return complete


class _Round:
    """One meeting: who is expected, and who has come."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        self.arrived: dict[str, Future[list[str]]] = {}


def _release(complete: list[tuple[_Round, list[str]]]) -> None:
    # Outside of the lock: completing a future sends the answers.
    for one, gone in complete:
        for future in one.arrived.values():
            future.set_result(gone)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
