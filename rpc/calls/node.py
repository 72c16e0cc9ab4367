"""The state of this process in its world: tables that calls from other members use.

They are created before the transport starts, so that no call can arrive too early.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping
from typing import Any

from torch.futures import Future

from ..errors import RpcError
from .calls import call_async, call_sync, served_immediately
from .directory import Directory, MeetingResult, MissingMembers, Place

# The timeout in seconds for asking which members are missing.
_ASK_S = 2.0

_tokens = itertools.count()


class Node:
    """The names and tables of this process."""

    def __init__(self, name: str, names: Mapping[int, str], rpc_timeout: float) -> None:
        self.name = name
        self.names = dict(names)
        self.members = tuple(sorted(names.values()))
        self.manager = names[0]
        self.rpc_timeout = rpc_timeout
        # The values and services of this process.
        self.offers: dict[Place, Any] = {}
        # The results that references refer to, by number.
        self.kept: dict[str, Any] = {}
        # The living `RpcGroup`s that were created here, by name.
        self.groups: dict[str, Any] = {}
        self.lock = threading.RLock()
        # Completed when this process leaves the world; the manager waits for it.
        self.has_left: Future[None] = Future()
        self.directory = Directory(self.members) if name == self.manager else None
        self._withdrawals: dict[str, Future[None]] = {}

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the manager's directory."""
        if self.directory is not None:
            return getattr(self.directory, method)(*args)
        return call_sync(self.manager, _manage, (method, *args), description=f"{method}()")

    def meet(
        self,
        meeting: Hashable,
        members: tuple[str, ...],
        description: str,
        timeout: float,
        *,
        needs_all: bool = True,
    ) -> MeetingResult:
        """Wait until all living ``members`` have arrived at ``meeting``.

        Args:
            meeting: identifies the meeting.
            members: the names of the processes that must call this.
            description: the name of the meeting in errors.
            timeout: in seconds; 0 waits without limit.
            needs_all: whether the death of a member is an error.

        Raises:
            RpcError: members did not arrive in time, or have died; the text names them.
            ValueError: members disagree on ``members``.
        """
        token = f"{self.name}/{next(_tokens)}"
        arrival = "meet", meeting, self.name, members, token, needs_all
        try:
            met: MeetingResult = call_sync(
                self.manager, _manage, arrival, timeout=timeout, description=description
            )
        except RpcError as error:
            try:
                call_args = "give_up", meeting, self.name, members, token
                late: MissingMembers | MeetingResult | Exception = call_sync(
                    self.manager, _manage, call_args, timeout=_ASK_S
                )
            except RpcError:
                # The manager does not answer; the first error explains why.
                raise error from None
            if isinstance(late, MissingMembers):
                text = f"{names_and_verb(late.names)} {late.state} within {timeout:g} s"
                raise RpcError(f"{description}: {text}") from error
            if isinstance(late, Exception):
                raise late from error
            met = late
        if needs_all and met.gone:
            raise RpcError(f"{description}: {names_and_verb(met.gone)} ended")
        return met

    def withdraw(self, group: str, generation: int) -> None:
        """Ask the manager to delete this process's keys in a group, without waiting."""
        call_args = "withdraw", group, generation, self.name
        if self.directory is not None:
            self.ask(*call_args)
        else:
            self._withdrawals[group] = call_async(self.manager, _manage, call_args)

    def wait_for_withdrawal(self, group: str) -> None:
        """Wait until the manager has deleted this process's keys in the last group of that name."""
        withdrawal = self._withdrawals.pop(group, None)
        if withdrawal is not None:
            withdrawal.wait()


def names_and_verb(names: list[str]) -> str:
    """Return "'a' has" or "'a', 'b' have"."""
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(map(repr, names))} {verb}"


_current: Node | None = None


def set_current(node: Node | None) -> None:
    """Set the node of this process."""
    global _current
    _current = node


def current() -> Node:
    """Return this process's node; raise RuntimeError without a world with RPC."""
    if _current is None:
        raise RuntimeError("this process must be in a world with RPC: create a World first")
    return _current


def current_or_none() -> Node | None:
    return _current


@served_immediately
def _manage(method: str, *args: Any) -> Any:
    directory = current().directory
    if directory is None:
        raise RuntimeError(f"{current().name!r} is not the manager of its world")
    return getattr(directory, method)(*args)


@served_immediately
def wait_for_leave() -> Future[None]:
    """Return a future that completes when this process leaves its world.

    If this process dies, the caller's future fails.
    """
    return current().has_left
