"""An ordered server for states, dictionaries of tensors, to and from which only changes travel.

Versions share the tensors that did not change. A mark names one state of one server, so that a
client can say what it has; the numbers of versions could not, since a server that was started
anew counts from the beginning.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ..calls.group import RpcGroup, held_or_none
from .model_state import copied, on_cpu
from .ordered_server import OrderedServerBase, OrderedServerSimple, OrderedServerSimpleImpl

State = Mapping[str, Any]
# A service and its arguments, to be called along with another call: group, key, arguments.
Wanted = tuple[str, str, tuple[Any, ...]]


class Mark(NamedTuple):
    """One state under one key: the server that was started, not its name, and a push there."""

    server: str
    number: int


class Update(NamedTuple):
    """What leads to the newest state.

    Attributes:
        version: its version.
        mark: its mark; None of servers that have none.
        is_whole: whether `state` is all of it, not only what changed since the client's mark.
        state: None where the client has nothing older.
    """

    version: Any
    mark: Mark | None
    is_whole: bool = False
    state: State | None = None


class NothingKeptError(KeyError):
    """There is no state which the pushed changes could be applied to."""


class StateServer(OrderedServerSimple):
    """Calls a `StateServerImpl`; its `push` and `pull` move whole states."""

    def push_changes(
        self, key: Hashable, state: State, version: int, mark: Mark | None
    ) -> Future[Mark | None]:
        """Offer a state as version + 1, the successor of `version`, without waiting for it.

        Args:
            key: any key.
            state: what changed since `mark`, or the whole, where that is None.
            version: of the state that was changed.
            mark: of the same.

        Returns:
            The mark of the new state, None where it was refused. Waiting for it raises
            NothingKeptError where the key is new, so that only a whole state will do.
        """
        given = key, state, version + 1, version, mark
        return self.group.registered_async(f"{self.server_name}/_push_changes", given)

    def pull_changes(
        self, key: Hashable, version: Any, mark: Mark | None, lacking: Set[str] = frozenset()
    ) -> Update | None:
        """Return what leads to the newest state; None where there is no such key.

        Args:
            key: any key.
            version: of the caller's state: it is told nothing about older ones. None asks for
                the newest in any case.
            mark: of the caller's state. One of another server makes `version` meaningless.
            lacking: names to be told, changed or not.
        """
        given = key, version, mark, set(lacking)
        service = f"{self.server_name}/_pull_changes"
        found: Update | None = self.group.registered_sync(service, given)
        return found

    def wanted(self, key: Hashable, mark: Mark | None) -> Wanted:
        """Return what asks for the newest state, for `pull_here`."""
        service = f"{self.server_name}/_pull_changes"
        return self.group.get_group_name(), service, (key, None, mark, frozenset())


def pull_here(wanted: Wanted) -> Update | None:
    """Return what leads to the newest state; None where there is none in this process.

    The state's tensors are the server's: they are for sending.
    """
    group, key, args = wanted
    service = held_or_none("service", group, key)
    return None if service is None else service(*args)


class StateServerImpl(OrderedServerSimpleImpl):
    """An ordered server of states that knows when each of their tensors was last changed."""

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1) -> None:
        self._name = secrets.token_hex(8)
        self._ledgers: dict[Hashable, _Ledger] = {}
        super().__init__(server_name, group, version_depth)

    def _services(self) -> dict[str, Callable[..., Any]]:
        return {
            **super()._services(),
            "_push_changes": self._push_changes,
            "_pull_changes": self._pull_changes,
        }

    def _accessor(self) -> StateServer:
        return StateServer(self.server_name, self.group)

    def _push_service(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        return self._push_changes(key, value, version, prev_version, None) is not None

    def _push_changes(
        self, key: Hashable, state: State, version: Any, prev_version: Any, mark: Mark | None
    ) -> Mark | None:
        if not isinstance(state, Mapping):
            raise TypeError(f"a state is a mapping from names to tensors, not {type(state)}")
        # Tensors are neither copied nor compared under the lock.
        with self._lock:
            ledger = self._ledgers.get(key) or _Ledger()
            newest = super()._pull_service(key)
            old: State = {} if newest is None else newest[0]
            if mark is not None:
                if newest is None:
                    raise NothingKeptError(f"nothing is kept under {key!r}")
                if mark != Mark(self._name, ledger.number):
                    return None
            whole = dict(state) if mark is None else {**old, **state}
            if not super()._push_service(key, whole, version, prev_version):
                return None
            self._ledgers[key] = ledger
            ledger.note(state, is_whole=whole.keys() != old.keys())
            return Mark(self._name, ledger.number)

    def _pull_changes(
        self, key: Hashable, version: Any, mark: Mark | None, lacking: Set[str]
    ) -> Update | None:
        with self._lock:
            newest = super()._pull_service(key)
            if newest is None:
                return None
            state, newest_version = newest
            ledger = self._ledgers[key]
            update = Update(newest_version, Mark(self._name, ledger.number))
            is_ours = mark is not None and mark.server == self._name
            is_comparable = version is not None and (mark is None or is_ours)
            if mark == update.mark or (is_comparable and version >= newest_version):
                return update
            if mark is None or not is_ours or mark.number < ledger.whole:
                return update._replace(is_whole=True, state=state)
            changed = {name for name, number in ledger.changes.items() if number > mark.number}
            return update._replace(state={name: state[name] for name in changed | lacking})


def pull_update(
    server: OrderedServerBase, key: Hashable, version: Any, known: KnownState
) -> Update | None:
    """Return what leads to the newest state on any ordered server; None without one.

    Args:
        version: of the caller's state, None to ask for the newest in any case.
    """
    if isinstance(server, StateServer):
        return server.pull_changes(key, version, known.mark, known.lacking)
    found = server.pull(key)
    if found is None:
        return None
    state, newest = found
    is_newer = version is None or newest > version
    return Update(newest, None, is_whole=True, state=state if is_newer else None)


def own_state_server(undo: contextlib.ExitStack, server_name: str, group: RpcGroup) -> StateServer:
    """Keep the states of another server here, until `undo` is closed; return what calls it."""
    name = f"{server_name}_o_server"
    undo.callback(StateServerImpl(name, group).close)
    return StateServer(name, group)


@dataclass
class _Ledger:
    """When what was changed under one key.

    Attributes:
        number: of the last push.
        whole: of the last push that changed the names.
        changes: by name, the last push that changed its tensor.
    """

    number: int = 0
    whole: int = 0
    changes: dict[str, int] = field(default_factory=dict)

    def note(self, names: State, *, is_whole: bool) -> None:
        self.number += 1
        if is_whole:
            self.whole = self.number
            self.changes.clear()
        self.changes.update(dict.fromkeys(names, self.number))


# An integer of the same size, by which tensors are compared: NaN is itself, and -0 is not 0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class KnownState:
    """The state with which a model was last pushed or pulled.

    Attributes:
        version: the model's.
        mark: the server's, None for none.
        state: the state.
        lacking: names of what belongs to it, but is not known here any more.
    """

    version: int = 0
    mark: Mark | None = None
    state: dict[str, Any] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)

    def belongs_to(self, own: State) -> bool:
        """Return whether a model's state has the same names."""
        return own.keys() == self.state.keys() | self.lacking

    def changes(self, own: State) -> dict[str, Any]:
        """Return what of a model's state differs, on the CPU; not copied where it is there."""
        here = {name: on_cpu(value) for name, value in own.items()}
        return {
            name: value for name, value in here.items() if not _is_same(self.state.get(name), value)
        }

    def keep(self, changes: State, own: State) -> None:
        """Copy what was sent into what is known, without new memory where there is some."""
        for name, value in changes.items():
            kept = self.state.get(name)
            if value is not own[name]:
                self.state[name] = value
            elif kept is not None and _is_alike(kept, value):
                kept.copy_(value)
            else:
                self.state[name] = copied(value)

    def forget(self, names: State) -> None:
        """Note that what is known under these names is not the server's."""
        self.lacking |= names.keys()
        for name in names:
            self.state.pop(name, None)

    def updated(self, update: Update) -> KnownState:
        """Return what is known after an update."""
        assert update.state is not None
        state = dict(update.state) if update.is_whole else {**self.state, **update.state}
        return KnownState(update.version, update.mark, state)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.dtype == other.dtype and one.shape == other.shape


def _is_same(one: Any, other: Any) -> bool:
    if not _is_alike(one, other):
        return False
    bits = _BITS.get(one.element_size())
    return torch.equal(one, other) if bits is None else one.view(bits).equal(other.view(bits))
