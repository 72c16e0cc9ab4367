"""What the manager of a world, rank 0, knows: who holds which key, who waits for whom, who is gone.

Nobody waits here: who comes to a meeting gets a future, which the last one to come completes. All
methods are called from the transport's threads.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch.futures import Future

from ..errors import RpcError

Kind = Literal["value", "service"]
# What is held: in which table, of which group, under which key.
Place = tuple[Kind, str, Hashable]

# How many results of meetings are kept, for those whose answer came too late.
_REMEMBERED = 1000


class Met(NamedTuple):
    """How a meeting ended: its number, the same for all who were there, and who had died."""

    number: int
    gone: list[str]


class Late(NamedTuple):
    """Whom a member has waited for in vain: those who have "not come", else "given up" again."""

    names: list[str]
    state: str


class Directory:
    """The tables and meetings of a world."""

    def __init__(self, names: Iterable[str]) -> None:
        self._holders: dict[Place, str] = {}
        self._living = set(names)
        self._rounds: list[_Round] = []
        self._over: dict[str, Met] = {}
        self._count = 0
        self._lock = threading.Lock()

    def add(self, place: Place, holder: str) -> bool:
        """Note the holder of a key; False where another one has it."""
        with self._lock:
            if holder not in self._living:
                raise RpcError(f"{holder!r} is held to be gone")
            # The same holder comes again after an answer that was lost.
            return self._holders.setdefault(place, holder) == holder

    def remove(self, place: Place, holder: str) -> bool:
        """Forget a key; False where `holder` does not hold it."""
        with self._lock:
            return self._holders.get(place) == holder and bool(self._holders.pop(place))

    def find(self, place: Place) -> str | None:
        return self._holders.get(place)

    def hint(self, kind: Kind, group: str, key: Hashable) -> str:
        """Return what somebody may have meant by a key that nobody holds, for the error's text."""
        other: Kind = "service" if kind == "value" else "value"
        with self._lock:
            if (other, group, key) in self._holders:
                return f"; it is the key of a {other}"
            keys = [one for *table, one in self._holders if table == [kind, group]]
        return did_you_mean(key, keys)

    def withdraw(self, group: str, generation: int, holder: str) -> None:
        """Forget everything that `holder` has in a group, and end its barriers there."""
        error = RuntimeError(f"group {group!r} has been destroyed in {holder!r}")
        with self._lock:
            self._forget(holder, group)
            ended = self._take_arrivals(holder, error, barrier_place(group, generation))
        _answer(ended)

    def note_gone(self, name: str) -> None:
        """Forget a process that has ended, and release those who wait for it."""
        with self._lock:
            if name not in self._living:
                return
            self._living.discard(name)
            self._forget(name)
            ended = self._take_arrivals(name, RuntimeError(f"{name!r} is held to be gone"))
            ended += self._take_complete()
        _answer(ended)

    def meet(
        self, place: Hashable, name: str, members: tuple[str, ...], token: str, is_whole: bool
    ) -> Future[Met]:
        """Arrive at a place; the future is complete when all living members have arrived.

        A name that arrives twice is counted in the next round; `token` tells its arrivals apart.
        All who are there get a ValueError when they expect different members. A meeting that must
        be whole ends at once when a member has died, since nobody can take its place.
        """
        arrival: Future[Met] = Future()
        with self._lock:
            here = (one for one in self._rounds if one.place == place and name not in one.arrived)
            found = next(here, None)
            if found is None:
                found = _Round(place, members, is_whole)
                self._rounds.append(found)
            others = _list(found.arrived)
            found.arrived[name] = token, arrival
            found.gave_up.discard(name)
            ended: list[_Ended] = []
            if set(found.members) != set(members):
                self._rounds.remove(found)
                text = f"{others} the members {_list(found.members)}"
                error = ValueError(f"{name!r} names the members {_list(members)}, {text}")
                ended = [(one, error) for _, one in found.arrived.values()]
            ended += self._take_complete()
        _answer(ended)
        return arrival

    def give_up(self, name: str, token: str) -> Late | Met:
        """Leave a place where one has waited too long; `Met` if the last one has come since."""
        with self._lock:
            here = (one for one in self._rounds if one.arrived.get(name, ("",))[0] == token)
            found = next(here, None)
            if found is None:
                return self._over.get(token, Met(0, []))
            _, arrival = found.arrived.pop(name)
            absent = [one for one in found.members if one not in found.arrived and one != name]
            missing = [one for one in absent if one not in found.gave_up]
            found.gave_up.add(name)
            if not found.arrived:
                self._rounds.remove(found)
        # Nobody reads it, but while an answer is owed the transport cannot be freed.
        arrival.set_result(Met(0, []))
        return Late(missing, "not come") if missing else Late(absent, "given up")

    def _forget(self, holder: str, group: str | None = None) -> None:
        """Forget what a process holds, in one group or in all."""
        for place, name in list(self._holders.items()):
            if name == holder and group in (None, place[1]):
                del self._holders[place]

    def _take_arrivals(
        self, name: str, error: Exception, place: Hashable | None = None
    ) -> list[_Ended]:
        """Take a member out of the meetings where it is, those at one place or all."""
        rounds = [one for one in self._rounds if name in one.arrived and place in (None, one.place)]
        return [(one.arrived.pop(name)[1], error) for one in rounds]

    def _take_complete(self) -> list[_Ended]:
        """Take out the rounds that wait for nobody any more."""
        ended: list[_Ended] = []
        for one in list(self._rounds):
            gone = [name for name in one.members if name not in self._living]
            is_over = one.is_whole and bool(gone)
            if not is_over and any(n not in one.arrived and n not in gone for n in one.members):
                continue
            self._rounds.remove(one)
            self._count += 1
            met = Met(self._count, gone)
            for token, arrival in one.arrived.values():
                self._over[token] = met
                ended.append((arrival, met))
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        return ended


@dataclass
class _Round:
    """One meeting: who is expected, who has come, and who has left again."""

    place: Hashable
    members: tuple[str, ...]
    is_whole: bool
    arrived: dict[str, tuple[str, Future[Met]]] = field(default_factory=dict)
    gave_up: set[str] = field(default_factory=set)


_Ended = tuple[Future[Met], Met | Exception]


def _answer(ended: Iterable[_Ended]) -> None:
    """Complete futures. Not under the lock: completing one sends the answer."""
    for arrival, outcome in ended:
        answer: Any = (
            arrival.set_exception if isinstance(outcome, Exception) else arrival.set_result
        )
        answer(outcome)


def barrier_place(group: str, generation: int) -> Hashable:
    """Return where the members of a group meet; a group made anew meets elsewhere."""
    return "barrier", group, generation


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return "; did you mean 'x'?" with the nearest of those known, or "" where none is near."""
    if not isinstance(name, str):
        return ""
    names = [one for one in known if isinstance(one, str)]
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
