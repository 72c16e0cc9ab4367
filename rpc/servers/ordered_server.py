"""A key-value store whose values have versions: each push names the one that it replaces.

One for states, dictionaries of tensors, to and from which only changes travel: versions share the
tensors that did not change. A mark names one state of one server, so that a client can say what it
has; the numbers of versions could not, since a server that was started anew counts from the
beginning.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ..calls.group import RpcGroup
from .model_state import copied, on_cpu


class OrderedServerBase(ABC):
    """What clients of an ordered server call; override both methods.

    Versions may be anything that can be compared for equality and hashed. `version` equal to
    `prev_version` is allowed, and says nothing about order.
    """

    @abstractmethod
    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Offer `value` as the successor of `prev_version`; False if another one was faster."""

    @abstractmethod
    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return value and version, the newest by default; None where there is no such."""


class OrderedServerSimple(OrderedServerBase):
    """Calls the server of that name, from any member; can be sent to other members.

    Both methods raise KeyError where there is no such server, and RpcError where it is gone or has
    not answered in time; a value that was pushed may have arrived then.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name = server_name
        self.group = group

    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Offer `value` as the successor of `prev_version`; return whether it is the newest now.

        It is, if `prev_version` was the newest, or if the key is new, whatever `prev_version` says.
        An older version that is still kept is refused.
        """
        service = f"{self.server_name}/_push_service"
        accepted: bool = self.group.registered_sync(service, (key, value, version, prev_version))
        return accepted

    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return a copy of a value and its version, the newest by default; None without one."""
        service = f"{self.server_name}/_pull_service"
        found: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return found


class OrderedServerSimpleImpl:
    """Keeps the last versions of each key, and takes only successors of the newest one.

    Lives in the process that makes it until `close`. An `OrderedServerSimple` that calls it is
    paired under its name: `group.get_paired(server_name).to_here()`.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        version_depth: how many versions are kept behind the newest one, so one more in all.

    Raises:
        AssertionError: this process is no member, or the depth is no positive integer.
        KeyError: the group has a server of that name.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: Any) -> None:
        assert version_depth > 0, "version_depth must be positive"
        assert isinstance(version_depth, int), "version_depth must be an integer"
        assert group.is_member(), "an ordered server needs a group that its process belongs to"
        self.server_name = server_name
        self.group = group
        self.version_depth = version_depth
        # Of each key its versions, the newest last. Values are never changed, so nothing is copied.
        self._versions: dict[Hashable, dict[Any, Any]] = {}
        # Held for a few dictionary operations.
        self._lock = threading.RLock()
        with contextlib.ExitStack() as undo:
            # The accessor last: who finds it may call at once.
            for name, service in self._services().items():
                offer(undo, group, "service", f"{server_name}/{name}", service)
            offer(undo, group, "value", server_name, self._accessor())
            self._offers = undo.pop_all()

    def close(self) -> None:
        """Withdraw the server and forget its values; may be called again."""
        self._offers.close()
        self._versions.clear()

    def _services(self) -> dict[str, Callable[..., Any]]:
        return {"_push_service": self._push_service, "_pull_service": self._pull_service}

    def _accessor(self) -> OrderedServerSimple:
        return OrderedServerSimple(self.server_name, self.group)

    def _push_service(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        # What is replaced or dropped may be large: it is freed after the lock.
        freed = []
        with self._lock:
            versions = self._versions.setdefault(key, {})
            if versions:
                newest = next(reversed(versions))
                if prev_version != newest or (version in versions and version != newest):
                    return False
                freed.append(versions.get(version))
            versions[version] = value
            if len(versions) > self.version_depth + 1:
                freed.append(versions.pop(next(iter(versions))))
        return True

    def _pull_service(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        with self._lock:
            versions = self._versions.get(key)
            if not versions:
                return None
            wanted = next(reversed(versions)) if version is None else version
            return (versions[wanted], wanted) if wanted in versions else None


def offer(
    undo: contextlib.ExitStack, group: RpcGroup, kind: str, key: Hashable, offered: Any
) -> None:
    """Offer a value or service under `key`, until `undo` is closed."""
    (group.pair if kind == "value" else group.register)(key, offered)

    def withdraw() -> None:
        # A destroyed group and an ended world have withdrawn it already.
        with contextlib.suppress(KeyError, RuntimeError):
            (group.unpair if kind == "value" else group.deregister)(key)

    undo.callback(withdraw)


State = Mapping[str, Any]


# One state under a key: the server that was started, not its name, and the number of a push there.
Mark = tuple[str, int]


class Update(NamedTuple):
    """What leads to the newest state: all of it, or what changed since the client's mark."""

    version: Any
    # None of servers that have none.
    mark: Mark | None
    is_whole: bool = False
    # None where the client has nothing older.
    state: State | None = None


class NothingKeptError(KeyError):
    """There is no state which the pushed changes could be applied to."""


class StateServer(OrderedServerSimple):
    """Calls a `StateServerImpl`; its `push` and `pull` move whole states."""

    def push_changes(
        self, key: Hashable, state: State, version: int, mark: Mark | None
    ) -> Future[Mark | None]:
        """Offer a state as the successor of the one of `version` and `mark`, without waiting.

        Args:
            state: what changed since `mark`, or the whole, where that is None.

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

        The caller has the state of `mark` and `version`, but for the names that it is `lacking`. A
        mark of another server makes the version meaningless; None asks for the newest in any case.
        """
        given = key, version, mark, set(lacking)
        service = f"{self.server_name}/_pull_changes"
        found: Update | None = self.group.registered_sync(service, given)
        return found


class StateServerImpl(OrderedServerSimpleImpl):
    """An ordered server of states that knows when each of their tensors was last changed."""

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1) -> None:
        self._name = secrets.token_hex(8)
        self._ledgers: dict[Hashable, _Ledger] = {}
        super().__init__(server_name, group, version_depth)

    def _services(self) -> dict[str, Callable[..., Any]]:
        services = super()._services()
        services["_push_changes"] = self._push_changes
        services["_pull_changes"] = self._pull_changes
        return services

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
                if mark != (self._name, ledger.number):
                    return None
            whole = dict(state) if mark is None else {**old, **state}
            if not super()._push_service(key, whole, version, prev_version):
                return None
            self._ledgers[key] = ledger
            ledger.note(state, is_whole=whole.keys() != old.keys())
            return (self._name, ledger.number)

    def _pull_changes(
        self, key: Hashable, version: Any, mark: Mark | None, lacking: Set[str]
    ) -> Update | None:
        with self._lock:
            newest = super()._pull_service(key)
            if newest is None:
                return None
            state, newest_version = newest
            ledger = self._ledgers[key]
            update = Update(newest_version, (self._name, ledger.number))
            # The push that the client knows; 0 is none of this server.
            known = mark[1] if mark is not None and mark[0] == self._name else 0
            is_comparable = version is not None and (mark is None or known > 0)
            if mark == update.mark or (is_comparable and version >= newest_version):
                return update
            if known < ledger.whole:
                return update._replace(is_whole=True, state=state)
            changed = {name for name, number in ledger.changes.items() if number > known}
            return update._replace(state={name: state[name] for name in changed | lacking})


def pull_update(
    server: OrderedServerBase, key: Hashable, version: Any, known: KnownState
) -> Update | None:
    """Return what leads from `known` to the newest state on any ordered server; None without one.

    Nothing older than `version`; where that is None, the newest in any case.
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
    """The numbers of the pushes under one key: the last one, and what was changed when."""

    number: int = 0
    # The last one that changed the names.
    whole: int = 0
    # By name, the last one that changed its tensor.
    changes: dict[str, int] = field(default_factory=dict)

    def note(self, names: State, *, is_whole: bool) -> None:
        self.number += 1
        if is_whole:
            self.whole = self.number
            self.changes.clear()
        self.changes.update(dict.fromkeys(names, self.number))


# An integer of the same size, by which tensors are compared: NaN is itself, and -0 is not 0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Copies of what changes at each push are made this seldom.
_PUSHES_PER_COPY = 16


@dataclass
class KnownState:
    """The state with which a model was last pushed or pulled."""

    version: int = 0
    mark: Mark | None = None
    state: dict[str, Any] = field(default_factory=dict)
    # Names of what belongs to it, but is not known here any more.
    lacking: set[str] = field(default_factory=set)
    # Names of what had changed in the last push, and the number of pushes.
    changing: set[str] = field(default_factory=set)
    pushes: int = 0

    def belongs_to(self, own: State) -> bool:
        return own.keys() == self.state.keys() | self.lacking

    def changes(self, own: State) -> dict[str, Any]:
        """Return what of a model's state differs or is not known, on the CPU.

        It is not copied where it is there.
        """
        here = {name: on_cpu(value) for name, value in own.items()}
        return {
            name: value for name, value in here.items() if not _is_same(self.state.get(name), value)
        }

    def keep(self, changes: State, own: State) -> None:
        """Copy what was sent into what is known, without new memory where there is some.

        Not what changes at each push, but for every sixteenth: it would be compared for nothing.
        """
        self.pushes += 1
        lasting = self.changing if self.pushes % _PUSHES_PER_COPY else set()
        self.changing = {name for name in changes if name in self.state or name in self.changing}
        for name, value in changes.items():
            kept = self.state.get(name)
            if name in lasting and value is own[name]:
                self.state.pop(name, None)
            elif value is not own[name]:
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
        assert update.state is not None
        state = dict(update.state) if update.is_whole else {**self.state, **update.state}
        return KnownState(
            update.version, update.mark, state, changing=self.changing, pushes=self.pushes
        )


def _is_alike(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and one.dtype == other.dtype and one.shape == other.shape


def _is_same(one: Any, other: Any) -> bool:
    if not _is_alike(one, other):
        return False
    bits = _BITS.get(one.element_size())
    return torch.equal(one, other) if bits is None else one.view(bits).equal(other.view(bits))
