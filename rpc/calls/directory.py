"""What the manager of a world knows: who holds which key, who waits for whom, who is gone.

It lives on rank 0. All methods are called from the transport's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Literal, NamedTuple

from ..errors import RpcError
from ..settings import did_you_mean
from .meetings import Meetings

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

    Attributes:
        meetings: who waits where.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._entries: dict[tuple[Kind, str, Hashable], Entry] = {}
        self._living = set(names)
        self._lock = threading.Lock()
        self.meetings = Meetings(lambda name: name not in self._living)

    def add(self, kind: Kind, group: str, key: Hashable, entry: Entry) -> bool:
        """Note the holder of a key; False where another one has it."""
        with self._lock:
            if entry.holder not in self._living:
                raise RpcError(f"{entry.holder!r} is held to be gone")
            # The same holder comes again after an answer that was lost.
            known = self._entries.get((kind, group, key), entry)
            if known.holder != entry.holder:
                return False
            self._entries[kind, group, key] = entry
            return True

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

    def hint(self, kind: Kind, group: str, key: Hashable) -> str:
        """Return what somebody may have meant by a key that nobody holds, for the error's text."""
        with self._lock:
            here = [(of, name) for of, place, name in self._entries if place == group]
        other: Kind = "service" if kind == "value" else "value"
        if (other, key) in here:
            return f"; it is the key of a {other}"
        return did_you_mean(key, (name for of, name in here if of == kind))

    def withdraw(self, group: str, generation: int, holder: str) -> None:
        """Forget everything that `holder` has in a group, and end its barriers there."""
        with self._lock:
            self._forget(lambda name, entry: name == group and entry.holder == holder)
        text = f"group {group!r} has been destroyed in {holder!r}"
        self.meetings.leave(barrier_place(group, generation), holder, text)

    def note_gone(self, name: str) -> None:
        """Forget a process that has ended, and release those who wait for it."""
        with self._lock:
            if name not in self._living:
                return
            self._living.discard(name)
            self._forget(lambda _, entry: entry.holder == name)
        self.meetings.note_gone(name)

    def _forget(self, concerns: Callable[[str, Entry], bool]) -> None:
        for place in [place for place, entry in self._entries.items() if concerns(place[1], entry)]:
            del self._entries[place]


def barrier_place(group: str, generation: int) -> Hashable:
    """Return where the members of a group meet; a group made anew meets elsewhere."""
    return "barrier", group, generation
