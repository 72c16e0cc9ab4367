"""A key-value store with versions: each push names the version that it replaces.

``StateServer`` is for states (dicts of tensors) and only sends the tensors that have changed. For
that, a client sends the mark of the state that it has. A mark identifies one state of one server.
Version numbers cannot do this, because they start again when a server is restarted.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.futures import Future

from ...primitives.tensor_bits import same_bits
from ..calls.group import RpcGroup
from .model_state import check_same_model, copied, copy_to_cpu


class OrderedServerBase(ABC):
    """The client interface of an ordered server; subclasses override both methods.

    Versions may be any hashable objects. ``version`` may equal ``prev_version``.
    """

    @abstractmethod
    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Push ``value`` as the successor of ``prev_version``; return whether it was accepted."""

    @abstractmethod
    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return value and version, by default the newest; None if they do not exist."""


class OrderedServerSimple(OrderedServerBase):
    """A client of an ordered server, for any member; it can be sent to other members.

    Args:
        server_name: the name given to ``OrderedServerSimpleImpl``.
        group: the group of the server.

    Raises:
        KeyError: from both methods: the server does not exist.
        RpcError: from both methods: the server has died or does not answer in time. A pushed value
            may have been accepted nevertheless.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name = server_name
        self.group = group

    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Push ``value`` as the successor of ``prev_version``; return whether it was accepted.

        It is accepted if the key is new, or if ``prev_version`` is the newest version and
        ``version`` is not one of the older versions that are still kept.
        """
        service = f"{self.server_name}/_push_service"
        accepted: bool = self.group.registered_sync(service, (key, value, version, prev_version))
        return accepted

    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return a copy of a value, by default the newest, and its version; None if missing."""
        service = f"{self.server_name}/_pull_service"
        answer: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return answer


class OrderedServerSimpleImpl:
    """A server that keeps the last versions of each key and only accepts successors of the newest.

    It lives in the process that creates it until ``close``. Members get a client, an
    ``OrderedServerSimple``, by ``group.get_paired(server_name).to_here()``.

    Args:
        server_name: unique in the group.
        group: this process must be a member.
        version_depth: the number of versions kept in addition to the newest one.

    Raises:
        AssertionError: this process is not a member, or the depth is not a positive integer.
        TypeError: the depth is not a number.
        KeyError: the group has a server of that name.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: Any) -> None:
        _check_depth(version_depth)
        if not group.is_member():
            raise AssertionError("an ordered server needs a group that this process belongs to")
        self.server_name = server_name
        self.group = group
        self.version_depth = version_depth
        # By key and version, the newest last. Values are replaced, never changed, so not copied.
        self._versions: dict[Hashable, dict[Any, Any]] = {}
        self._lock = threading.RLock()
        with contextlib.ExitStack() as undo:
            # The client is paired last, because members may call as soon as they find it.
            for name, service in self._services().items():
                offer(undo, group, "service", f"{server_name}/{name}", service)
            offer(undo, group, "value", server_name, self._accessor())
            self._offers = undo.pop_all()

    def close(self) -> None:
        """Withdraw the server and delete its values; may be called again."""
        self._offers.close()
        self._versions.clear()

    def _services(self) -> dict[str, Callable[..., Any]]:
        return {"_push_service": self._push_service, "_pull_service": self._pull_service}

    def _accessor(self) -> OrderedServerSimple:
        return OrderedServerSimple(self.server_name, self.group)

    def _push_service(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        # Replaced and dropped values may be large, so they are freed after the lock is released.
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
            version_to_pull = next(reversed(versions)) if version is None else version
            return (
                (versions[version_to_pull], version_to_pull)
                if version_to_pull in versions
                else None
            )


def _check_depth(depth: object) -> None:
    # Not by assert statements, which python -O removes.
    text = f"version_depth must be a positive integer, got {depth!r}"
    if not isinstance(depth, int | float):
        raise TypeError(text)
    if not isinstance(depth, int) or depth < 1:
        raise AssertionError(text)


def offer(
    undo: contextlib.ExitStack, group: RpcGroup, kind: str, key: Hashable, offered: Any
) -> None:
    """Offer a value or service under ``key`` until ``undo`` is closed."""
    (group.pair if kind == "value" else group.register)(key, offered)

    def withdraw() -> None:
        # It is withdrawn already if the group was destroyed or the world has ended.
        with contextlib.suppress(KeyError, RuntimeError):
            (group.unpair if kind == "value" else group.deregister)(key)

    undo.callback(withdraw)


State = Mapping[str, Any]

# Identifies a state: a random identifier of the server, and the number of the push.
Mark = tuple[str, int]


class Update(NamedTuple):
    """The newest state, or the changes since the client's mark."""

    version: Any
    # None if the server has no marks.
    mark: Mark | None
    is_whole: bool = False
    # None if the client's state is the newest.
    state: State | None = None


class NothingKeptError(KeyError):
    """The server has no state to which the pushed changes could be applied."""


class StateServer(OrderedServerSimple):
    """A client of a ``StateServerImpl``; ``push`` and ``pull`` send whole states."""

    def push_changes(
        self, key: Hashable, state: State, version: int, mark: Mark | None
    ) -> Future[Mark | None]:
        """Push a state as the successor of ``version`` and ``mark``, without waiting.

        Args:
            key: the key of the model.
            state: the changes since ``mark``, or the whole state if ``mark`` is None.
            version: the version that is replaced.
            mark: the state that the changes apply to.

        Returns:
            A future of the new state's mark, or of None if the push was refused. It raises
            NothingKeptError if the key is new and the state is not whole, and KeyError or
            ValueError if names or shapes differ from the newest state.
        """
        call_args = key, state, version + 1, version, mark
        return self.group.registered_async(f"{self.server_name}/_push_changes", call_args)

    def pull_changes(
        self, key: Hashable, version: Any, mark: Mark | None, lacking: Set[str] = frozenset()
    ) -> Update | None:
        """Return the update to the newest state; None if the key does not exist.

        Args:
            key: the key of the model.
            version: the caller's version; the server sends a newer state only. It is ignored if
                it is None or if ``mark`` belongs to another server.
            mark: identifies the caller's state.
            lacking: names in that state whose tensors the caller has not kept.
        """
        call_args = key, version, mark, set(lacking)
        service = f"{self.server_name}/_pull_changes"
        answer: Update | None = self.group.registered_sync(service, call_args)
        return answer


class StateServerImpl(OrderedServerSimpleImpl):
    """An ordered server of states that records when each of their tensors was last changed."""

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
        call_args = key, value, version, prev_version, None
        return self._push_changes(*call_args, needs_same=False) is not None

    def _push_changes(
        self,
        key: Hashable,
        state: State,
        version: Any,
        prev_version: Any,
        mark: Mark | None,
        *,
        needs_same: bool = True,
    ) -> Mark | None:
        """Push a state; ``needs_same`` requires the names and shapes of the newest state."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a state must be a mapping from names to tensors, got {type(state)}")
        # The lock is held briefly: tensors are neither copied nor compared.
        with self._lock:
            ledger = self._ledgers.get(key) or _Ledger()
            newest = super()._pull_service(key)
            previous: State = {} if newest is None else newest[0]
            if mark is not None:
                if newest is None:
                    raise NothingKeptError(f"nothing is kept under {key!r}")
                if mark != (self._name, ledger.number):
                    return None
            merged = dict(state) if mark is None else {**previous, **state}
            if needs_same and newest is not None and newest[1] == prev_version:
                check_same_model(merged, previous)
            if not super()._push_service(key, merged, version, prev_version):
                return None
            self._ledgers[key] = ledger
            ledger.note(state, is_whole=merged.keys() != previous.keys())
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
            # The last push that the client has; 0 if it has none of this server.
            client_number = mark[1] if mark is not None and mark[0] == self._name else 0
            is_comparable = version is not None and (mark is None or client_number > 0)
            if mark == update.mark or (is_comparable and version >= newest_version):
                return update
            if client_number < ledger.whole:
                return update._replace(is_whole=True, state=state)
            changed = {name for name, number in ledger.changes.items() if number > client_number}
            return update._replace(state={name: state[name] for name in changed | lacking})


def pull_update(
    server: OrderedServerBase, key: Hashable, version: Any, base: KnownState
) -> Update | None:
    """Return the update from ``base`` to the newest state on any server; None if it has no state.

    Its ``state`` is None if the caller already has the newest state: the mark of ``base`` is the
    newest mark, or ``version`` is the newest version or later.
    """
    if isinstance(server, StateServer):
        return server.pull_changes(key, version, base.mark, base.lacking)
    answer = server.pull(key)
    if answer is None:
        return None
    state, newest = answer
    is_newer = version is None or newest > version
    return Update(newest, None, is_whole=True, state=state if is_newer else None)


def own_state_server(undo: contextlib.ExitStack, server_name: str, group: RpcGroup) -> StateServer:
    """Create a state server for another server, until ``undo`` is closed; return its client."""
    name = f"{server_name}_o_server"
    undo.callback(StateServerImpl(name, group).close)
    return StateServer(name, group)


@dataclass
class _Ledger:
    """The numbers of the pushes under one key."""

    # The last push.
    number: int = 0
    # The last push that changed the names.
    whole: int = 0
    # The last push that changed each tensor, by name.
    changes: dict[str, int] = field(default_factory=dict)

    def note(self, names: State, *, is_whole: bool) -> None:
        self.number += 1
        if is_whole:
            self.whole = self.number
            self.changes.clear()
        self.changes.update(dict.fromkeys(names, self.number))


# CPU tensors that change at each push are only copied once in this many pushes.
_PUSHES_PER_COPY = 16


@dataclass
class KnownState:
    """The state with which a model was last pushed or pulled."""

    version: int = 0
    mark: Mark | None = None
    state: dict[str, Any] = field(default_factory=dict)
    # Names in the state whose tensors are not kept any more.
    lacking: set[str] = field(default_factory=set)
    # Names of tensors that changed in the last push, and the number of pushes.
    changing: set[str] = field(default_factory=set)
    pushes: int = 0

    def belongs_to(self, model_state: State) -> bool:
        return model_state.keys() == self.state.keys() | self.lacking

    def changes(self, model_state: State) -> dict[str, Any]:
        """Return the entries of a model's state that differ or are unknown, on the CPU.

        Entries that are on the CPU are not copied.
        """
        on_host = {name: copy_to_cpu(value) for name, value in model_state.items()}
        return {
            name: value
            for name, value in on_host.items()
            if not _is_same(self.state.get(name), value)
        }

    def keep(self, changes: State, model_state: State) -> None:
        """Copy the sent changes into the known state, into existing memory if possible.

        CPU tensors that change at each push are not copied, because comparing them would not save
        anything. One push in ``_PUSHES_PER_COPY`` copies them, to find those that stay the same.
        """
        self.pushes += 1
        lasting = self.changing if self.pushes % _PUSHES_PER_COPY else set()
        self.changing = {name for name in changes if name in self.state or name in self.changing}
        for name, value in changes.items():
            stored = self.state.get(name)
            if name in lasting and value is model_state[name]:
                self.state.pop(name, None)
            elif value is not model_state[name]:
                self.state[name] = value
            elif stored is not None and _is_alike(stored, value):
                stored.copy_(value)
            else:
                self.state[name] = copied(value)

    def forget(self, names: State) -> None:
        """Drop the tensors of these names, because they differ from the server's."""
        self.lacking |= names.keys()
        for name in names:
            self.state.pop(name, None)

    def updated(self, update: Update) -> KnownState:
        assert update.state is not None
        state = dict(update.state) if update.is_whole else {**self.state, **update.state}
        return KnownState(
            update.version, update.mark, state, changing=self.changing, pushes=self.pushes
        )


def _is_alike(value: Any, other: Any) -> bool:
    are_tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
    return are_tensors and value.dtype == other.dtype and value.shape == other.shape


def _is_same(value: Any, other: Any) -> bool:
    return _is_alike(value, other) and same_bits(value, other)
