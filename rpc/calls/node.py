"""This process's end of its world: the tables that calls from other members find.

The tables are there before the transport is, so that no call can come too early.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from torch.futures import Future

from ..errors import RpcError
from .calls import (
    answered_later,
    call_async,
    call_sync,
    devices,
    fail_by,
    never_waits,
    own_name,
)
from .directory import Directory, Kind
from .meetings import Late, Met
from .remote_errors import Failure, describe, rebuild

Place = tuple[str, Hashable]

# How long a question about who is missing may take, in seconds.
_ASK_S = 2.0

_tokens = itertools.count()


class Kept:
    """What a reference refers to, on its owner.

    Attributes:
        holders: the numbers of the references; the first one has the value's own.
        is_begun: whether the call has come.
    """

    def __init__(self, number: str) -> None:
        self.holders = {number}
        self.is_begun = False
        self._value: Any = None
        self._failure: Failure | None = None
        # Not of the value: which devices that may be on is not known yet.
        self._end: Future[None] = Future()

    def settle(self, value: Any) -> None:
        """Note what the call has returned."""
        self._value = value
        self._end.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Note what the call has raised."""
        self._failure = describe(error, own_name())
        self._end.set_result(None)

    def value(self) -> Future[Any]:
        """Return a future of the value, or of the error."""
        told: Future[Any] = Future(devices=devices())

        def tell(_: Future[None]) -> None:
            if self._failure is not None:
                fail_by(told, partial(_raise_again, self._failure))
                return
            try:
                told.set_result(self._value)
            except Exception as error:
                fail_by(told, partial(_raise_again, describe(error, own_name())))

        self._end.add_done_callback(tell)
        return told


def _raise_again(failure: Failure) -> None:
    raise rebuild(failure)


class Node:
    """Names and tables.

    Attributes:
        tables: what this process holds, values and services, by group and key.
        kept: the results that references of other processes refer to, by their numbers.
        groups: the `RpcGroup`s that were made here and not destroyed, by name.
        left: completed when this process leaves the world; the manager waits for it.
        directory: the manager's tables, None on all others.
    """

    def __init__(self, name: str, names: Mapping[int, str], rpc_timeout: float) -> None:
        self.name = name
        self.names = dict(names)
        self.members = tuple(sorted(names.values()))
        self.manager = names[0]
        self.rpc_timeout = rpc_timeout
        self.tables: dict[Kind, dict[Place, Any]] = {"value": {}, "service": {}}
        self.kept: dict[str, Kept] = {}
        self.groups: dict[str, object] = {}
        self.lock = threading.RLock()
        self._withdrawals: dict[str, Future[None]] = {}
        self.left: Future[None] = Future()
        self.directory = Directory(self.members) if name == self.manager else None

    def ask(self, method: str, *args: Any, timeout: float = -1) -> Any:
        """Call a method of the manager's directory."""
        if self.directory is not None:
            return getattr(self.directory, method)(*args)
        given, what = (method, *args), f"{method}()"
        return call_sync(self.manager, _directory_call, given, timeout=timeout, what=what)

    def meet(
        self, place: Hashable, members: tuple[str, ...], what: str, timeout: float
    ) -> list[str]:
        """Wait until all living `members` have come to `place`; return those that are gone.

        Args:
            what: what the meeting is, for errors.
            timeout: in seconds; 0 waits as long as it takes.

        Raises:
            RpcError: members have not come in time; they are named.
            ValueError: others expect other members.
        """
        return self._meet(place, members, what, timeout, is_whole=False).gone

    def meet_all(self, place: Hashable, members: tuple[str, ...], what: str, timeout: float) -> int:
        """Like `meet`, but a member that is gone is an error; return the meeting's number."""
        met = self._meet(place, members, what, timeout, is_whole=True)
        if met.gone:
            raise RpcError(f"{what}: {_named(met.gone)} ended")
        return met.number

    def _meet(
        self,
        place: Hashable,
        members: tuple[str, ...],
        what: str,
        timeout: float,
        *,
        is_whole: bool,
    ) -> Met:
        token = f"{self.name}/{next(_tokens)}"
        arrival = place, self.name, members, token, is_whole
        try:
            met: Met = call_sync(self.manager, _meet, arrival, timeout=timeout, what=what)
            return met
        except RpcError as error:
            late = self._late(place, token, error)
            if isinstance(late, Met):
                return late
            who = (
                f"{_named(late.missing)} not come"
                if late.missing
                else f"{_named(late.gave_up)} given up"
            )
            raise RpcError(f"{what}: {who} within {timeout:g} s") from error

    def withdraw(self, group: str, generation: int) -> None:
        """Have the manager forget what this process holds in a group, without waiting for it."""
        if self.directory is not None:
            self.directory.withdraw(group, generation, self.name)
            return
        args = "withdraw", group, generation, self.name
        self._withdrawals[group] = call_async(self.manager, _directory_call, args)

    def wait_for_withdrawal(self, group: str) -> None:
        """Wait until the manager has forgotten the group of before."""
        withdrawal = self._withdrawals.pop(group, None)
        if withdrawal is not None:
            withdrawal.wait()

    def _late(self, place: Hashable, token: str, error: RpcError) -> Late | Met:
        """Ask who had not come; a manager that does not answer is the error itself."""
        try:
            late: Late | Met = call_sync(
                self.manager, _give_up, (place, self.name, token), timeout=_ASK_S
            )
        except RpcError:
            raise error from None
        return late


def _named(names: list[str]) -> str:
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(map(repr, names))} {verb}"


_current: Node | None = None


def set_current(node: Node | None) -> None:
    """Make `node` the one that calls find."""
    global _current
    _current = node


def current() -> Node:
    """Return this process's node.

    Raises:
        RuntimeError: there is no world here, or one without RPC.
    """
    if _current is None:
        raise RuntimeError("there is no world with RPC in this process: make a World first")
    return _current


def is_there() -> bool:
    """Whether this process is in a world with RPC."""
    return _current is not None


def live_group(name: str) -> object:
    """Return this process's living `RpcGroup` of that name, None where it has none."""
    return None if _current is None else _current.groups.get(name)


def own_directory() -> Directory:
    """Return the manager's tables, in the manager's process."""
    directory = current().directory
    if directory is None:
        raise RuntimeError(f"{current().name!r} is not the manager of its world")
    return directory


@never_waits
def _directory_call(method: str, *args: Any) -> Any:
    return getattr(own_directory(), method)(*args)


@never_waits
@answered_later
def _meet(
    place: Hashable, name: str, members: tuple[str, ...], token: str, is_whole: bool
) -> Future[Met]:
    return own_directory().meetings.meet(place, name, members, token, is_whole)


@never_waits
def _give_up(place: Hashable, name: str, token: str) -> Late | Met:
    return own_directory().meetings.give_up(place, name, token)


@answered_later
def wait_for_leave() -> Future[None]:
    """Complete when the process that is asked leaves its world; an error says that it died."""
    return current().left
