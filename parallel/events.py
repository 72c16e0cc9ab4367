"""Events made of events: set while any, or all, of their members are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["AndEvent", "MultiEvent", "OrEvent"]


class MultiEvent:
    """What `OrEvent` and `AndEvent` share: an event whose state is that of its members.

    Members know nothing of an event made of them, except while a thread waits for it.
    """

    def __init__(self, *events: threading.Event | MultiEvent) -> None:
        for event in events:
            if not isinstance(event, (threading.Event, MultiEvent)):
                raise ValueError(
                    f"{type(self).__name__}() takes threading.Event, OrEvent and AndEvent objects, "
                    f"got {type(event).__name__}"
                )
        self._events = events
        self._conditions = {_notifying_condition(leaf) for leaf in self._leaves()}

    def is_set(self) -> bool:
        """Return whether the members are set as is asked for: any of them, or all."""
        raise NotImplementedError

    def set(self) -> None:
        """Do nothing: the members are what can be set."""

    def clear(self) -> None:
        """Do nothing: the members are what can be cleared."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most `timeout` seconds; return whether it was.

        True also where it was set for a moment only.
        """
        if self.is_set():
            return True
        if timeout is not None and timeout <= 0:
            return False
        waiter = _Waiter(self)
        for condition in self._conditions:
            condition.waiters.add(waiter)
        try:
            # What was set before the waiter was there has not notified it.
            return self.is_set() or waiter.wait(timeout)
        finally:
            for condition in self._conditions:
                condition.waiters.discard(waiter)

    def _leaves(self) -> Iterator[threading.Event]:
        for event in self._events:
            if isinstance(event, MultiEvent):
                yield from event._leaves()
            else:
                yield event


class OrEvent(MultiEvent):
    """Is set while any of the given events is.

    Args:
        events: `threading.Event` objects or events of this kind.

    Raises:
        ValueError: for anything else.
    """

    def is_set(self) -> bool:
        """Return whether any of the events is set."""
        return any(event.is_set() for event in self._events)


class AndEvent(MultiEvent):
    """Is set while all of the given events are.

    Args:
        events: `threading.Event` objects or events of this kind.

    Raises:
        ValueError: for anything else.
    """

    def is_set(self) -> bool:
        """Return whether all of the events are set."""
        return all(event.is_set() for event in self._events)


class _Waiter:
    """Notified by the thread that sets the event; the one that waits for it wakes."""

    def __init__(self, event: MultiEvent) -> None:
        self._event = event
        # Unlike a condition it may be put to by a signal handler of the very thread that waits.
        self._notices: SimpleQueue[None] = SimpleQueue()

    def notify(self) -> None:
        if self._event.is_set():
            self._notices.put(None)

    def wait(self, timeout: float | None) -> bool:
        try:
            self._notices.get(timeout=timeout)
        except Empty:
            return self._event.is_set()
        return True


class _NotifyingCondition(threading.Condition):
    """The condition that `threading.Event.set` notifies once its flag is changed."""

    waiters: set[_Waiter]

    def notify_all(self) -> None:
        super().notify_all()
        for waiter in tuple(self.waiters):
            waiter.notify()


def _notifying_condition(leaf: threading.Event) -> _NotifyingCondition:
    # Its class changes, not its method `set`, which others may hold already (a timer, say); what
    # waits for it goes on to do so.
    found: Any = vars(leaf)["_cond"]
    vars(found).setdefault("waiters", set())
    found.__class__ = _NotifyingCondition
    condition: _NotifyingCondition = found
    return condition
