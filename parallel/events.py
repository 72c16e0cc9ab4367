"""Events that combine other events: set while any, or all, of their members are set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from .arguments import seconds

__all__ = ["AndEvent", "OrEvent"]


class _MultiEvent:
    """An event whose state follows from its members; they notify it only during ``wait``."""

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
        """Return whether any (``OrEvent``) or all (``AndEvent``) of the members are set."""
        return type(self)._of(event.is_set() for event in self._events)

    def set(self) -> None:
        """Do nothing: only the members can be set."""

    def clear(self) -> None:
        """Do nothing: only the members can be cleared."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most ``timeout`` seconds.

        Returns:
            Whether the event was set, even if only for a moment.
        """
        if self.is_set():
            return True
        timeout = seconds("timeout", timeout)
        if timeout is not None and timeout <= 0:
            return False
        # A queue, because a signal handler of the waiting thread may set a member: with a condition
        # it would deadlock.
        notices: SimpleQueue[None] = SimpleQueue()

        def notify() -> None:
            if self.is_set():
                notices.put(None)

        for condition in self._conditions:
            condition.callbacks.add(notify)
        try:
            # A member may have been set before the callbacks were added.
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
    """An event that is set while any of the given events is set.

    Args:
        *events: ``threading.Event``, ``OrEvent`` and ``AndEvent`` objects.

    Raises:
        ValueError: an argument is of another type.
    """

    _of = any


class AndEvent(_MultiEvent):
    """An event that is set while all of the given events are set.

    Args:
        *events: ``threading.Event``, ``OrEvent`` and ``AndEvent`` objects.

    Raises:
        ValueError: an argument is of another type.
    """

    _of = all


class _NotifyingCondition(threading.Condition):
    """The condition of a ``threading.Event``. ``set`` notifies it after changing the flag."""

    callbacks: set[Callable[[], None]]

    def notify_all(self) -> None:
        super().notify_all()
        for callback in tuple(self.callbacks):
            callback()


def _notifying_condition(leaf: threading.Event) -> _NotifyingCondition:
    # The condition's class is replaced, not the event's method `set`, which other objects (such as
    # timers) may already refer to. Threads that wait for the event are not disturbed.
    attribute: Any = vars(leaf)["_cond"]
    vars(attribute).setdefault("callbacks", set())
    attribute.__class__ = _NotifyingCondition
    condition: _NotifyingCondition = attribute
    return condition
