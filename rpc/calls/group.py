"""RpcGroup: named processes that call each other and share values and services by key."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch._C._distributed_rpc import WorkerInfo
from torch.futures import Future

from ...primitives.suggestions import did_you_mean
from ..errors import RpcError
from . import calls as _calls
from . import node as _node
from .calls import Func
from .directory import Kind, barrier_place
from .node import Node
from .reference import RpcReference, call_remote

# A member's name, its rank in the world, or torch's description of it.
Target = str | int | WorkerInfo
Args = Iterable[Any]
Kwargs = dict[str, Any] | None

_STATES = {"value": "paired to", "service": "registered in"}


class RpcGroup:
    """A group of named processes that call each other and find values and services by key.

    Created by ``World.create_rpc_group``. A group can be sent: a member receives its own group of
    this name, any other process a handle that only supports calls and lookups.

    Timeouts are in seconds; -1 is the world's ``rpc_timeout``, 0 means no limit.

    Args:
        group_name: the name of the group.
        group_members: the names of its members.
        first_create: has no effect; kept for compatibility.

    Raises:
        KeyError: from methods with a key, except ``is_paired`` and ``is_registered``: the key is in
            use or not found; ``unpair`` and ``deregister`` only find keys of this process.
        RuntimeError: from ``barrier`` and methods that offer or withdraw keys: this process is not
            a member or has destroyed the group.
        RpcError: from all methods that communicate: a process has died or does not answer in time;
            the text names it.
    """

    def __init__(
        self, group_name: str, group_members: Iterable[str], first_create: bool = True
    ) -> None:
        self.group_name = group_name
        self.group_members = sorted(group_members)
        self.destroyed = False
        # Differs for each group created with this name; set when the members have met.
        self.generation = 0
        # The known holders of services, so that `registered_sync` asks rank 0 at the first call and
        # after a miss only. `registered_async` and `registered_remote` ask at each call, because
        # they return before a miss is known.
        self._holders: dict[Hashable, str] = {}

    def rpc_sync(
        self, to: Target, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> Any:
        """Call ``func`` on a member and return its result.

        Args:
            to: a member's name, its rank in the world, or its WorkerInfo of torch.
            func: any function, including lambdas and local functions. torch sends the tensors in
                arguments and results.
            timeout: in seconds.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            RuntimeError: ``to`` is not a member.
            Exception: the exception of ``func``, with the remote traceback as its cause;
                ``RpcException`` if it cannot be pickled there or rebuilt here.
        """
        return _calls.call_sync(self._member(to), func, args, kwargs, timeout)

    def rpc_async(
        self, to: Target, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> Future[Any]:
        """Like ``rpc_sync``, but return a future, whose ``wait()`` returns the result or raises."""
        return _calls.call_async(self._member(to), func, args, kwargs, timeout)

    def remote(
        self, to: Target, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> RpcReference:
        """Like ``rpc_sync``, but keep the result on ``to`` and return a reference immediately."""
        return call_remote(self._member(to), func, args, kwargs, timeout)

    def pair(self, key: Hashable, value: Any) -> None:
        """Offer a value of this process to all members under ``key``."""
        self._offer("value", key, value)

    def unpair(self, key: Hashable) -> None:
        """Withdraw a value that this process has paired."""
        self._withdraw("value", key)

    def is_paired(self, key: Hashable) -> bool:
        """Return whether any member has paired a value under ``key``."""
        return self._find("value", key) is not None

    def get_paired(self, key: Hashable) -> RpcReference:
        """Return a reference to the value paired under ``key``, which stays with its holder."""
        holder = self._find_or_raise("value", key)
        return RpcReference(holder, get_local, ("value", self.group_name, key))

    def register(self, key: Hashable, service: Func) -> None:
        """Offer a function of this process to all members under ``key``.

        If the service returns a torch future, the caller gets its value once it is complete, and no
        thread is occupied until then. Such a service does not need the decorator
        ``torch.distributed.rpc.functions.async_execution``, but may have it.
        """
        self._offer("service", key, service)

    def deregister(self, key: Hashable) -> None:
        """Withdraw a service that this process has registered."""
        self._withdraw("service", key)

    def is_registered(self, key: Hashable) -> bool:
        """Return whether any member has registered a service under ``key``."""
        return self._find("service", key) is not None

    def registered_sync(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, timeout: float = -1
    ) -> Any:
        """Call a registered service on its holder; return its result or raise its exception."""
        holder = self._holders.get(key)
        if holder is not None:
            call_args = self.group_name, key, tuple(args), dict(kwargs or {})
            try:
                answer = _calls.call_sync(
                    holder, _call_if_local, call_args, None, timeout, description=f"{key}()"
                )
            except RpcError:
                self._holders.pop(key, None)
                raise
            if answer is not _NotFound:
                return answer
        return self._call_service(_calls.call_sync, key, args, kwargs, timeout)

    def registered_async(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, timeout: float = -1
    ) -> Future[Any]:
        """Like ``registered_sync``, but return a future."""
        answer: Future[Any] = self._call_service(_calls.call_async, key, args, kwargs, timeout)
        return answer

    def registered_remote(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, timeout: float = -1
    ) -> RpcReference:
        """Like ``registered_sync``, but keep the result there and return a reference to it."""
        result: RpcReference = self._call_service(call_remote, key, args, kwargs, timeout)
        return result

    def barrier(self, timeout: float = -1) -> None:
        """Wait until every member has called this."""
        node = self._member_node()
        description = f"barrier of group {self.group_name!r}"
        limit = node.rpc_timeout if timeout == -1 else timeout
        meeting = barrier_place(self.group_name, self.generation)
        node.meet(meeting, tuple(self.group_members), description, limit)

    def destroy(self) -> None:
        """Leave the group and withdraw this process's keys, without waiting for others.

        The name can be used again once all members have destroyed the group.
        """
        self.destroyed = True
        node = _node.current_or_none()
        if node is None:
            # The world has ended, and this group with it.
            return
        with node.lock:
            if node.groups.get(self.group_name) is not self:
                return
            del node.groups[self.group_name]
            for address in [address for address in node.offers if address[1] == self.group_name]:
                del node.offers[address]
        node.withdraw(self.group_name, self.generation)

    def size(self) -> int:
        """Return the number of members."""
        return len(self.group_members)

    def is_member(self, target: Target | None = None) -> bool:
        """Return whether a process (None is this one) is a member."""
        return _get_name(target) in self.group_members

    def get_group_name(self) -> str:
        """Return the group's name."""
        return self.group_name

    def get_group_members(self) -> list[str]:
        """Return the names of the members, sorted."""
        return list(self.group_members)

    @staticmethod
    def get_cur_name() -> str:
        """Return the name of this process."""
        return _node.current().name

    def __reduce__(self) -> Any:
        return _group_here, (self.group_name, tuple(self.group_members))

    def __repr__(self) -> str:
        return f"RpcGroup({self.group_name!r}, {self.group_members})"

    def _member(self, to: Target) -> str:
        name = _get_name(to)
        if name not in self.group_members:
            raise RuntimeError(
                f"RPC target is not a member of group. {to!r} must be one of the members of "
                f"{self.group_name!r}: {', '.join(map(repr, self.group_members))}"
                f"{did_you_mean(name or '', self.group_members, limit=1, quoted=True)}"
            )
        return str(name)

    def _member_node(self) -> Node:
        """Return the node; raise RuntimeError unless this process is in the group."""
        node = _node.current()
        if not self.is_member():
            raise RuntimeError(
                f"{node.name!r} is not a member of group {self.group_name!r}: "
                f"{', '.join(map(repr, self.group_members))}"
            )
        if self.destroyed or self.group_name not in node.groups:
            raise RuntimeError(f"group {self.group_name!r} has been destroyed in {node.name!r}")
        return node

    def _offer(self, kind: Kind, key: Hashable, value: Any) -> None:
        node, address = self._member_node(), (kind, self.group_name, key)
        with node.lock:
            if address in node.offers:
                raise _key_error(self.group_name, kind, key, f"already {_STATES[kind]}")
            # Store it before the manager publishes it, so that no call arrives too early.
            node.offers[address] = value
        is_added = False
        try:
            is_added = node.ask("add", address, node.name)
        finally:
            if not is_added:
                node.offers.pop(address, None)
        if not is_added:
            raise _key_error(self.group_name, kind, key, f"already {_STATES[kind]}")

    def _withdraw(self, kind: Kind, key: Hashable) -> None:
        node, address = self._member_node(), (kind, self.group_name, key)
        is_removed = address in node.offers and node.ask("remove", address, node.name)
        node.offers.pop(address, None)
        if not is_removed:
            raise _key_error(self.group_name, kind, key, f"not {_STATES[kind]}")

    def _find(self, kind: Kind, key: Hashable) -> str | None:
        holder: str | None = _node.current().ask("find", (kind, self.group_name, key))
        return holder

    def _find_or_raise(self, kind: Kind, key: Hashable) -> str:
        holder = self._find(kind, key)
        if holder is None:
            hint = _node.current().ask("hint", kind, self.group_name, key)
            raise _key_error(self.group_name, kind, key, "not found on", hint)
        return holder

    def _call_service(
        self, call: Func, key: Hashable, args: Any, kwargs: Any, timeout: float
    ) -> Any:
        self._holders.pop(key, None)
        holder = self._holders[key] = self._find_or_raise("service", key)
        call_args = self.group_name, key, tuple(args), dict(kwargs or {})
        return call(holder, call_local_service, call_args, None, timeout, description=f"{key}()")


def _key_error(group: str, kind: Kind, key: Hashable, state: str, hint: str = "") -> KeyError:
    return KeyError(f"{kind.capitalize()} [{key}] {state} Group [{group}]{hint}")


def _get_name(target: Target | None) -> str | None:
    if target is None:
        return _node.current().name
    if isinstance(target, WorkerInfo):
        return str(target.name)
    return target if isinstance(target, str) else _node.current().names.get(target)


def _group_here(name: str, members: tuple[str, ...]) -> RpcGroup:
    """Return the living group of that name in this process, or a handle if there is none."""
    node = _node.current_or_none()
    group = None if node is None else node.groups.get(name)
    if isinstance(group, RpcGroup) and tuple(group.group_members) == members:
        return group
    return RpcGroup(name, members, first_create=False)


class _NotFound:
    """The answer of a process that does not hold the service."""


def find_local(kind: Kind, group: str, key: Hashable) -> Any:
    """Return the value or service that this process offers, None if it offers none."""
    return _node.current().offers.get((kind, group, key))


def get_local(kind: Kind, group: str, key: Hashable) -> Any:
    """Return the value or service that this process offers; raise KeyError if it offers none."""
    node = _node.current()
    try:
        return node.offers[kind, group, key]
    except KeyError:
        raise _key_error(group, kind, key, "not found on", f" in {node.name!r}") from None


def call_local_service(group: str, key: Hashable, args: Any, kwargs: Any) -> Any:
    return get_local("service", group, key)(*args, **kwargs)


def _call_if_local(group: str, key: Hashable, args: Any, kwargs: Any) -> Any:
    service = find_local("service", group, key)
    return _NotFound if service is None else service(*args, **kwargs)
