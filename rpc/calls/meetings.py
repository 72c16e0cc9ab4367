"""Meetings of members at a place, kept by the manager of a world.

Nobody waits here: who arrives gets a future, which the last one to come completes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from torch.futures import Future

_REMEMBERED = 1000


class Met(NamedTuple):
    """How a meeting ended.

    Attributes:
        number: the same for all who were there, and for no other meeting.
        gone: those who never will come, having died.
    """

    number: int
    gone: list[str]


class Late(NamedTuple):
    """Whom a member has waited for in vain.

    Attributes:
        missing: those who had not come.
        gave_up: those who had, and had left again.
    """

    missing: list[str]
    gave_up: list[str]


class Arrival(NamedTuple):
    """One member at a place; `token` tells it from later ones of the same member."""

    token: str
    answer: Future[Met]


class Meetings:
    """Who waits where.

    Args:
        is_gone: whether a member has died; called under the lock.
    """

    def __init__(self, is_gone: Callable[[str], bool]) -> None:
        self._is_gone = is_gone
        self._rounds: dict[Hashable, list[_Round]] = {}
        self._over: dict[str, Met] = {}
        self._count = 0
        self._lock = threading.Lock()

    def meet(
        self, place: Hashable, name: str, members: tuple[str, ...], token: str, is_whole: bool
    ) -> Future[Met]:
        """Arrive at a place; the future is complete when all living members have arrived.

        A name that arrives twice is counted in the next round.

        Args:
            is_whole: end at once when a member has died, since nobody can take its place.

        Raises:
            ValueError: in all who are there, when they expect different members.
        """
        answer: Future[Met] = Future()
        with self._lock:
            rounds = self._rounds.setdefault(place, [])
            found = next((one for one in rounds if name not in one.arrived), None)
            if found is None:
                found = _Round(members, is_whole)
                rounds.append(found)
            others = _list(found.arrived)
            found.arrived[name] = Arrival(token, answer)
            found.gave_up.discard(name)
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
            _fail(found.arrived.values(), ValueError(text))
        return answer

    def give_up(self, place: Hashable, name: str, token: str) -> Late | Met:
        """Leave a place where one has waited too long; `Met` if the last one has come since."""
        with self._lock:
            rounds = self._rounds.get(place, [])
            found = next((one for one in rounds if one.token_of(name) == token), None)
            if found is None:
                return self._over.get(token, Met(0, []))
            answer = found.arrived.pop(name).answer
            found.gave_up.add(name)
            missing = [one for one in found.members if one not in found.arrived]
            late = Late(
                [one for one in missing if one not in found.gave_up],
                sorted(found.gave_up.difference([name])),
            )
            if not found.arrived:
                self._remove(place, found)
        # Nobody reads it, but while an answer is owed the transport cannot be freed.
        answer.set_result(Met(0, []))
        return late

    def leave(self, place: Hashable, name: str, text: str) -> None:
        """End what a member waits for at a place, by an error of that text."""
        with self._lock:
            rounds = self._rounds.get(place, [])
            leaving = [one.arrived.pop(name) for one in rounds if name in one.arrived]
        _fail(leaving, RuntimeError(text))

    def note_gone(self, name: str) -> None:
        """Release those who wait for a member that has died."""
        with self._lock:
            rounds = [one for at_place in self._rounds.values() for one in at_place]
            dead = [one.arrived.pop(name) for one in rounds if name in one.arrived]
            complete = self._take_complete()
        _release(complete)
        _fail(dead, RuntimeError(f"{name!r} is held to be gone"))

    def _take_complete(self) -> list[tuple[_Round, Met]]:
        """Take out the rounds that wait for nobody any more."""
        complete = []
        for place in list(self._rounds):
            for one in list(self._rounds[place]):
                gone = [name for name in one.members if self._is_gone(name)]
                is_over = one.is_whole and bool(gone)
                if is_over or all(name in one.arrived or name in gone for name in one.members):
                    self._count += 1
                    met = Met(self._count, gone)
                    complete.append((one, met))
                    self._remove(place, one)
                    self._remember(one, met)
        return complete

    def _remember(self, one: _Round, met: Met) -> None:
        """Keep the last results, for those whose answer came too late."""
        self._over.update((arrival.token, met) for arrival in one.arrived.values())
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def _remove(self, place: Hashable, one: _Round) -> None:
        self._rounds[place].remove(one)
        if not self._rounds[place]:
            del self._rounds[place]


class _Round:
    """One meeting: who is expected, who has come, and who has left again."""

    def __init__(self, members: tuple[str, ...], is_whole: bool) -> None:
        self.members = members
        self.is_whole = is_whole
        self.arrived: dict[str, Arrival] = {}
        self.gave_up: set[str] = set()

    def token_of(self, name: str) -> str | None:
        """Return the token of a member's arrival, None if it is not here."""
        arrival = self.arrived.get(name)
        return None if arrival is None else arrival.token


# Outside of the lock: completing a future sends the answer.
def _release(complete: list[tuple[_Round, Met]]) -> None:
    for one, met in complete:
        for arrival in one.arrived.values():
            arrival.answer.set_result(met)


def _fail(arrivals: Iterable[Arrival], error: Exception) -> None:
    for arrival in arrivals:
        arrival.answer.set_exception(error)  # type: ignore[arg-type]


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
