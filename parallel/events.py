"""Events made of events: set while any, or all, of their members are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

__all__ = ["AndEvent", "OrEvent"]


class _MultiEvent:
    """An event whose state is that of its members, which know of it only while it is waited for."""

    _of: ClassVar[Callable[[Iterable[bool]], bool]]

    def __init__(self, *events: threading.Event | _MultiEvent) -> None:
        for event in events:
            if not isinstance(event, (threading.Event, _MultiEvent)):
                raise ValueError(
                    f"{type(self).__name__}() takes threading.Event, OrEvent and AndEvent objects, "
                    f"got {type(event).__name__}"
                )
        self._events = events
        self._conditions = {_notifying_condition(leaf) for leaf in self._leaves()}

    def is_set(self) -> bool:
        """Return whether the members are set as is asked for: any of them, or all."""
        return type(self)._of(event.is_set() for event in self._events)

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
        # Unlike a condition it may be put to by a signal handler of the very thread that waits.
        notices: SimpleQueue[None] = SimpleQueue()

        def notify() -> None:
            if self.is_set():
                notices.put(None)

        for condition in self._conditions:
            condition.callbacks.add(notify)
        try:
            # What was set before has notified nobody.
            if not self.is_set():
                notices.get(timeout=timeout)
            return True
        except Empty:
            return self.is_set()
        finally:
            for condition in self._conditions:
                condition.callbacks.discard(notify)

    def _leaves(self) -> Iterator[threading.Event]:
        for event in self._events:
            if isinstance(event, _MultiEvent):
                yield from event._leaves()
            else:
                yield event


class OrEvent(_MultiEvent):
    """Is set while any of the given events is: `threading.Event` objects or events of this kind.

    Raises:
        ValueError: for anything else.
    """

    _of = any


class AndEvent(_MultiEvent):
    """Is set while all of the given events are: `threading.Event` objects or events of this kind.

    Raises:
        ValueError: for anything else.
    """

    _of = all


class _NotifyingCondition(threading.Condition):
    """The condition that `threading.Event.set` notifies once its flag is changed."""

    callbacks: set[Callable[[], None]]

    def notify_all(self) -> None:
        super().notify_all()
        for callback in tuple(self.callbacks):
            callback()


def _notifying_condition(leaf: threading.Event) -> _NotifyingCondition:
    # Its class changes, not its method `set`, which others may hold already (a timer, say); what
    # waits for it goes on to do so.
    found: Any = vars(leaf)["_cond"]
    vars(found).setdefault("callbacks", set())
    found.__class__ = _NotifyingCondition
    condition: _NotifyingCondition = found
    return condition
