"""Values and services under keys: held here, noted by the manager, found by all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, cast

from torch.futures import Future

from ..errors import RpcError
from . import node as _node
from .calls import answered_later, call_sync, is_async
from .directory import Entry, Kind
from .node import Node
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
            raise self._unknown("value", key)
        return RpcReference(entry.holder, _held_value, (self._group, key))

    def call_sync(
        self, key: Hashable, args: Iterable[Any], kwargs: dict[str, Any] | None, timeout: float
    ) -> Any:
        """Call a service where it was found before, else where it is now.

        Raises:
            KeyError: nobody holds it.
        """
        call = partial(call_sync, what=f"{key}()")
        known = self._holders.get(key)
        if known is not None:
            given = self._group, key, tuple(args), dict(kwargs or {})
            try:
                answer = call(known.holder, _TRIES[known.is_async], given, timeout=timeout)
            except RpcError:
                self._holders.pop(key, None)
                raise
            if answer is not _NotHeld:
                return answer
        return self.call_by(call, key, args, kwargs, timeout)

    def call_by(
        self,
        call: Callable[..., Any],
        key: Hashable,
        args: Iterable[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
    ) -> Any:
        """Call a service by `call`, where it is now; what it gives later cannot be asked again.

        Raises:
            KeyError: nobody holds it.
        """
        entry = self._holder(key)
        given = self._group, key, tuple(args), dict(kwargs or {})
        return call(entry.holder, _ENTRIES[entry.is_async], given, timeout=timeout)

    def _holder(self, key: Hashable) -> Entry:
        self._holders.pop(key, None)
        entry = self.find("service", key)
        if entry is None:
            raise self._unknown("service", key)
        self._holders[key] = entry
        return entry

    def _unknown(self, kind: Kind, key: Hashable) -> KeyError:
        hint = _node.current().ask("hint", kind, self._group, key)
        return KeyError(f"{kind.capitalize()} [{key}] not found on Group [{self._group}]{hint}")


class _NotHeld:
    """The answer of a process that does not hold the key, which has called nothing then."""


def _missing(kind: Kind, group: str, key: Hashable) -> KeyError:
    name = _node.current().name
    return KeyError(f"{kind.capitalize()} [{key}] not found on Group [{group}] in {name!r}")


def _held_value(group: str, key: Hashable) -> Any:
    value = _node.current().tables["value"].get((group, key), _NotHeld)
    if value is _NotHeld:
        raise _missing("value", group, key)
    return value


def _try_held(group: str, key: Hashable, args: Any, kwargs: Any) -> Any:
    service = _node.current().tables["service"].get((group, key))
    return _NotHeld if service is None else service(*args, **kwargs)


def _call_held(group: str, key: Hashable, args: Any, kwargs: Any) -> Any:
    service = _node.current().tables["service"].get((group, key))
    if service is None:
        raise _missing("service", group, key)
    return service(*args, **kwargs)


@answered_later
def _try_held_async(group: str, key: Hashable, args: Any, kwargs: Any) -> Future[Any]:
    answer = _try_held(group, key, args, kwargs)
    if answer is not _NotHeld:
        return cast(Future[Any], answer)
    missing: Future[Any] = Future()
    missing.set_result(_NotHeld)
    return missing


@answered_later
def _call_held_async(group: str, key: Hashable, args: Any, kwargs: Any) -> Future[Any]:
    answer: Future[Any] = _call_held(group, key, args, kwargs)
    return answer


_ENTRIES = {False: _call_held, True: _call_held_async}
_TRIES = {False: _try_held, True: _try_held_async}
