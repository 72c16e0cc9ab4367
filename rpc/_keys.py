"""Values and services under keys: held here, noted by the manager, found by all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch.futures import Future

from . import _node
from ._calls import answered_later, is_async
from ._directory import Entry, Kind
from ._node import Node
from .errors import RpcError
from .reference import RpcReference


class Keys:
    """The keys of one group.

    Args:
        group: the group's name.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        # Who holds a service, as far as known here: asked once, and again after a miss.
        self._holders: dict[Hashable, Entry] = {}

    def hold(self, node: Node, kind: Kind, key: Hashable, value: Any) -> bool:
        """Offer a value or service of this process; False where the key is taken."""
        place = self._group, key
        table = node.tables[kind]
        with node.lock:
            if place in table:
                return False
            # Before the manager tells anyone, so that no call comes too early.
            table[place] = value
        is_added: bool = False
        try:
            entry = Entry(node.name, kind == "service" and is_async(value))
            is_added = node.ask("add", kind, self._group, key, entry)
        finally:
            if not is_added:
                table.pop(place, None)
        return is_added

    def release(self, node: Node, kind: Kind, key: Hashable) -> bool:
        """Withdraw what this process holds; False where it does not hold the key."""
        if (self._group, key) not in node.tables[kind]:
            return False
        is_removed: bool = node.ask("remove", kind, self._group, key, node.name)
        node.tables[kind].pop((self._group, key), None)
        return is_removed

    def find(self, kind: Kind, key: Hashable) -> Entry | None:
        """Ask the manager who holds a key."""
        found = _node.current().ask("find", kind, self._group, key)
        return None if found is None else Entry(*found)

    def reference(self, key: Hashable) -> RpcReference:
        """Return a reference to a value.

        Raises:
            KeyError: nobody holds it.
        """
        entry = self.find("value", key)
        if entry is None:
            raise KeyError(f"Value [{key}] not found on Group [{self._group}]")
        return RpcReference(entry.holder, _held_value, (self._group, key))

    def call(
        self,
        call: Callable[..., Any],
        key: Hashable,
        args: Iterable[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
    ) -> Any:
        """Call a service by `call`, where it lives.

        Raises:
            KeyError: nobody holds it.
        """
        given = self._group, key, tuple(args), dict(kwargs or {})
        known = self._holders.get(key)
        if known is not None:
            try:
                return call(known.holder, _ENTRIES[known.is_async], given, timeout=timeout)
            except _NotHeldError:
                # It has moved since. It was not called, so it may be called again.
                pass
            except RpcError:
                self.forget_holder(key)
                raise
        entry = self._holders[key] = self._holder(key)
        return call(entry.holder, _ENTRIES[entry.is_async], given, timeout=timeout)

    def forget_holder(self, key: Hashable) -> None:
        """Have the next call ask the manager."""
        self._holders.pop(key, None)

    def _holder(self, key: Hashable) -> Entry:
        entry = self.find("service", key)
        if entry is None:
            self.forget_holder(key)
            raise KeyError(f"Service [{key}] not found on Group [{self._group}]")
        return entry


class _NotHeldError(KeyError):
    """The process that was asked does not hold the key any more."""


def _held(kind: Kind, group: str, key: Hashable) -> Any:
    node = _node.current()
    try:
        return node.tables[kind][group, key]
    except KeyError:
        raise _NotHeldError(
            f"{kind.capitalize()} [{key}] not found on Group [{group}] in {node.name!r}"
        ) from None


def _held_value(group: str, key: Hashable) -> Any:
    return _held("value", group, key)


def _call_held(group: str, key: Hashable, args: Any, kwargs: Any) -> Any:
    return _held("service", group, key)(*args, **kwargs)


@answered_later
def _call_held_async(group: str, key: Hashable, args: Any, kwargs: Any) -> Future[Any]:
    answer: Future[Any] = _held("service", group, key)(*args, **kwargs)
    return answer


_ENTRIES = {False: _call_held, True: _call_held_async}
