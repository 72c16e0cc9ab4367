"""This process's end of its world: the tables that calls from other members find.

The tables are there before the transport is, so that no call can come too early.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping
from typing import Any

from torch.futures import Future

from ..errors import RpcError
from .calls import call_async, call_sync, never_waits
from .directory import Directory, Late, Met, Place

# How long a question about who is missing may take, in seconds.
_ASK_S = 2.0

_tokens = itertools.count()


class Node:
    """Names and tables."""

    def __init__(self, name: str, names: Mapping[int, str], rpc_timeout: float) -> None:
        self.name = name
        self.names = dict(names)
        self.members = tuple(sorted(names.values()))
        self.manager = names[0]
        self.rpc_timeout = rpc_timeout
        # The values and services of this process.
        self.held: dict[Place, Any] = {}
        # The results that references of other processes refer to, by their numbers.
        self.kept: dict[str, Any] = {}
        # The `RpcGroup`s that were made here and not destroyed, by name.
        self.groups: dict[str, Any] = {}
        self.lock = threading.RLock()
        # Completed when this process leaves the world; the manager waits for it.
        self.left: Future[None] = Future()
        self.directory = Directory(self.members) if name == self.manager else None
        self._withdrawals: dict[str, Future[None]] = {}

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the manager's directory."""
        if self.directory is not None:
            return getattr(self.directory, method)(*args)
        return call_sync(self.manager, _manage, (method, *args), what=f"{method}()")

    def meet(
        self,
        place: Hashable,
        members: tuple[str, ...],
        what: str,
        timeout: float,
        *,
        is_whole: bool = True,
    ) -> Met:
        """Wait until all living `members` have come to `place`; errors name `what` that is for.

        Raises:
            RpcError: members have not come in time or, where `is_whole`, are gone; they are named.
            ValueError: others expect other members.
        """
        token = f"{self.name}/{next(_tokens)}"
        arrival = "meet", place, self.name, members, token, is_whole
        try:
            met: Met = call_sync(self.manager, _manage, arrival, timeout=timeout, what=what)
        except RpcError as error:
            try:
                given = "give_up", self.name, token
                late: Late | Met = call_sync(self.manager, _manage, given, timeout=_ASK_S)
            except RpcError:
                # A manager that does not answer is the error itself.
                raise error from None
            if isinstance(late, Late):
                text = f"{named(late.names)} {late.state} within {timeout:g} s"
                raise RpcError(f"{what}: {text}") from error
            met = late
        if is_whole and met.gone:
            raise RpcError(f"{what}: {named(met.gone)} ended")
        return met

    def withdraw(self, group: str, generation: int) -> None:
        """Have the manager forget what this process holds in a group, without waiting for it."""
        given = "withdraw", group, generation, self.name
        if self.directory is not None:
            self.ask(*given)
        else:
            self._withdrawals[group] = call_async(self.manager, _manage, given)

    def wait_for_withdrawal(self, group: str) -> None:
        """Wait until the manager has forgotten the group of before."""
        withdrawal = self._withdrawals.pop(group, None)
        if withdrawal is not None:
            withdrawal.wait()


def named(names: list[str]) -> str:
    """Return "'a' has" or "'a', 'b' have"."""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(map(repr, names))} {verb}"


_current: Node | None = None


def set_current(node: Node | None) -> None:
    """Make `node` the one that calls find."""
    global _current
    _current = node


def current() -> Node:
    """Return this process's node; raise RuntimeError where it is in no world with RPC."""
    if _current is None:
        raise RuntimeError("there is no world with RPC in this process: make a World first")
    return _current


def current_or_none() -> Node | None:
    return _current


@never_waits
def _manage(method: str, *args: Any) -> Any:
    directory = current().directory
    if directory is None:
        raise RuntimeError(f"{current().name!r} is not the manager of its world")
    return getattr(directory, method)(*args)


@never_waits
def wait_for_leave() -> Future[None]:
    """Return what completes when the called process leaves its world; an error: it has died."""
    return current().left
