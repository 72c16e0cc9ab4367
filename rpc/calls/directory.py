"""The tables of a world's manager (rank 0): holders of keys, barriers, and dead processes.

No method blocks. A process that arrives at a barrier gets a future, which the last arrival
completes. All methods are called from the transport's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch.futures import Future

from ...primitives.suggestions import did_you_mean
from ..errors import RpcError

Kind = Literal["value", "service"]
# The kind, the group and the key of a value or service.
Place = tuple[Kind, str, Hashable]

# How many results are kept for members that give up just after the end of a meeting.
_REMEMBERED = 1000


class MeetingResult(NamedTuple):
    """The result of a meeting: its number, the same for all members, and the dead members."""

    number: int
    gone: list[str]


class MissingMembers(NamedTuple):
    """The absent members of a meeting.

    If ``state`` is "not arrived", they have never arrived. If it is "timed out", they arrived, but
    gave up before this process did.
    """

    names: list[str]
    state: str


class Directory:
    """The tables and meetings of a world."""

    def __init__(self, names: Iterable[str]) -> None:
        self._holders: dict[Place, str] = {}
        self._living = set(names)
        self._rounds: list[_Round] = []
        # By token, the outcomes of arrivals that have ended, or whose member has given up.
        self._over: dict[str, MeetingResult | MissingMembers | Exception] = {}
        self._count = 0
        self._lock = threading.Lock()

    def add(self, address: Place, holder: str) -> bool:
        """Record the holder of a key; return False if another process has the key."""
        with self._lock:
            if holder not in self._living:
                raise RpcError(f"{holder!r} is considered dead")
            # The same holder may ask again if the first answer was lost.
            return self._holders.setdefault(address, holder) == holder

    def remove(self, address: Place, holder: str) -> bool:
        """Delete a key; return False if ``holder`` does not hold it."""
        with self._lock:
            return self._holders.get(address) == holder and bool(self._holders.pop(address))

    def find(self, address: Place) -> str | None:
        return self._holders.get(address)

    def hint(self, kind: Kind, group: str, key: Hashable) -> str:
        """Return a suggestion for the error about a missing key, or ""."""
        other: Kind = "service" if kind == "value" else "value"
        with self._lock:
            if (other, group, key) in self._holders:
                return f"; it is the key of a {other}"
            keys = [candidate for *table, candidate in self._holders if table == [kind, group]]
        names = [candidate for candidate in keys if isinstance(candidate, str)]
        return did_you_mean(key, names, limit=1, quoted=True) if isinstance(key, str) else ""

    def withdraw(self, group: str, generation: int, holder: str) -> None:
        """Delete everything that ``holder`` has in a group, and end its barriers there."""
        error = RuntimeError(f"group {group!r} has been destroyed in {holder!r}")
        with self._lock:
            self._forget(holder, group)
            ended = self._take_arrivals(holder, error, barrier_place(group, generation))
        _answer(ended)

    def mark_dead(self, name: str) -> None:
        """Delete the entries of a dead process, and release members that wait for it."""
        with self._lock:
            if name not in self._living:
                return
            self._living.discard(name)
            self._forget(name)
            ended = self._take_arrivals(name, RuntimeError(f"{name!r} is considered dead"))
            ended += self._take_complete()
        _answer(ended)

    def meet(
        self, meeting: Hashable, name: str, members: tuple[str, ...], token: str, needs_all: bool
    ) -> Future[MeetingResult]:
        """Arrive at a place; the future completes when all living members have arrived.

        A name that arrives twice is counted in the next round; ``token`` identifies each arrival.
        If the arrivals differ in ``members``, all their futures raise ValueError. If the meeting
        ``needs_all`` members, it ends as soon as one has died.
        """
        arrival: Future[MeetingResult] = Future()
        with self._lock:
            if token in self._over:
                # The member has given up before its arrival was served, and does not read this.
                arrival.set_result(MeetingResult(0, []))
                return arrival
            open_rounds = (
                round_
                for round_ in self._rounds
                if round_.place == meeting and name not in round_.arrived
            )
            current = next(open_rounds, None)
            if current is None:
                current = _Round(meeting, members, needs_all)
                self._rounds.append(current)
            earlier = _list(current.arrived)
            current.arrived[name] = token, arrival
            current.gave_up.discard(name)
            ended: list[_Ended] = []
            if set(current.members) != set(members):
                self._rounds.remove(current)
                text = f"{earlier} gave the members {_list(current.members)}"
                error = ValueError(f"{name!r} gave the members {_list(members)}, but {text}")
                ended = [self._end(*arrivals, error) for arrivals in current.arrived.values()]
            ended += self._take_complete()
        _answer(ended)
        return arrival

    def give_up(
        self, meeting: Hashable, name: str, members: tuple[str, ...], token: str
    ) -> MissingMembers | MeetingResult | Exception:
        """Stop waiting at a place; return the result or error if the meeting has just ended.

        An arrival with this ``token`` that is served later does not count.
        """
        with self._lock:
            if token in self._over:
                return self._over[token]
            open_rounds = (
                round_ for round_ in self._rounds if round_.arrived.get(name, ("",))[0] == token
            )
            current = next(open_rounds, None)
            if current is None:
                open_rounds = (
                    o for o in self._rounds if o.place == meeting and name not in o.arrived
                )
                arrived = next(open_rounds, _Round(meeting, members, False)).arrived
                absent = [member for member in members if member not in arrived and member != name]
                late = MissingMembers(absent or [name], "not arrived")
                self._remember(token, late)
                return late
            _, arrival = current.arrived.pop(name)
            absent = [
                member
                for member in current.members
                if member not in current.arrived and member != name
            ]
            missing = [member for member in absent if member not in current.gave_up]
            current.gave_up.add(name)
            if not current.arrived:
                self._rounds.remove(current)
        # The result is not read, but the transport cannot end before every call is answered.
        arrival.set_result(MeetingResult(0, []))
        return (
            MissingMembers(missing, "not arrived")
            if missing
            else MissingMembers(absent, "timed out")
        )

    def _forget(self, holder: str, group: str | None = None) -> None:
        """Delete the keys of a process in one group or in all."""
        for address, name in list(self._holders.items()):
            if name == holder and group in (None, address[1]):
                del self._holders[address]

    def _take_arrivals(
        self, name: str, error: Exception, meeting: Hashable | None = None
    ) -> list[_Ended]:
        """Remove a member's arrivals at one place or everywhere; return their futures and error."""
        rounds = [
            round_
            for round_ in self._rounds
            if name in round_.arrived and meeting in (None, round_.place)
        ]
        return [self._end(*round_.arrived.pop(name), error) for round_ in rounds]

    def _take_complete(self) -> list[_Ended]:
        """Remove the complete rounds; return their futures and results."""
        ended: list[_Ended] = []
        for round_ in list(self._rounds):
            gone = [name for name in round_.members if name not in self._living]
            is_over = round_.needs_all and bool(gone)
            if not is_over and any(
                n not in round_.arrived and n not in gone for n in round_.members
            ):
                continue
            self._rounds.remove(round_)
            self._count += 1
            met = MeetingResult(self._count, gone)
            ended += [self._end(*arrived, met) for arrived in round_.arrived.values()]
        return ended

    def _end(
        self, token: str, arrival: Future[MeetingResult], outcome: MeetingResult | Exception
    ) -> _Ended:
        """Remember the outcome of an arrival; return its future and the outcome."""
        self._remember(token, outcome)
        return arrival, outcome

    def _remember(self, token: str, outcome: MeetingResult | MissingMembers | Exception) -> None:
        self._over[token] = outcome
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]


@dataclass
class _Round:
    """One meeting: the expected members, the arrivals, and the members that gave up waiting."""

    place: Hashable
    members: tuple[str, ...]
    needs_all: bool
    arrived: dict[str, tuple[str, Future[MeetingResult]]] = field(default_factory=dict)
    gave_up: set[str] = field(default_factory=set)


_Ended = tuple[Future[MeetingResult], MeetingResult | Exception]


def _answer(ended: Iterable[_Ended]) -> None:
    """Complete futures; call it without the lock, because completing one sends the answer."""
    for arrival, outcome in ended:
        answer: Any = (
            arrival.set_exception if isinstance(outcome, Exception) else arrival.set_result
        )
        answer(outcome)


def barrier_place(group: str, generation: int) -> Hashable:
    """Return the meeting place of a group's barrier, which differs for each group created."""
    return "barrier", group, generation


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
