"""Agree on the names and settings of all members before a world begins.

Rank 0 opens a world, reads the other members' entries, and publishes a verdict: the world begins,
or an error. The others wait for it, so none joins a world that failed or whose rank 0 has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from torch.distributed import Store

from ..calls.node import names_and_verb
from ..errors import RpcError
from .store import MeetingPlace, naming_store, wait_for_key

# How long rank 0 keeps the store, after an error or at the end, for members that still read it.
_LINGER_S = 3.0
# After one member has failed in a joint step, the other living ones finish or fail in this time.
_LAST_S = 1.0
_RETRY_S = 0.05
# How often waiting members check whether another world has been opened.
_POLL_S = 0.1

_VERDICT = "verdict"

# The names that torch's RPC accepts.
_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


class Member(NamedTuple):
    """The name, rank and settings of a process; ``settings`` must be the same everywhere."""

    name: object
    rank: int
    settings: Mapping[str, Any]


def agree_on_members(
    meeting: MeetingPlace, member: Member, world_size: int, timeout_s: float
) -> dict[int, str]:
    """Return the names of all members by rank; every member must call this.

    Raises:
        ValueError: another process has this rank; or, in all members, a name is invalid or given
            twice, or the settings differ.
        RpcError: members did not join in time; the text names them.
    """
    with naming_store(meeting, "the world cannot begin"):
        attempt = _Attempt(meeting, member, world_size, timeout_s)
        return attempt.lead() if member.rank == 0 else attempt.follow()


class _Attempt:
    def __init__(
        self, meeting: MeetingPlace, member: Member, world_size: int, timeout_s: float
    ) -> None:
        self._place = meeting
        self._own = member
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._keys = [f"member_{rank}" for rank in range(world_size)]
        entry = {
            "name": member.name,
            "settings": dict(member.settings),
            "token": secrets.token_hex(8),
        }
        self._entry = json.dumps(entry, default=repr)

    def lead(self) -> dict[int, str]:
        self._place.enter(0, self._deadline)
        store = self._place.store
        store.set("member_0", self._entry)
        try:
            names = self._collect(store)
        except BaseException as error:
            kind = "ValueError" if isinstance(error, ValueError) else "RpcError"
            text = str(error) or f"rank 0 was stopped by {type(error).__name__}"
            store.set(_VERDICT, json.dumps({"error": kind, "text": text}))
            if isinstance(error, ValueError):
                wait_for_readers(store, 0, self._world_size)
            elif isinstance(error, RpcError):
                wait_for_readers(store, 0, sum(store.check([key]) for key in self._keys))
            raise
        store.set(_VERDICT, json.dumps({"names": names}))
        return names

    def follow(self) -> dict[int, str]:
        """Join the world that rank 0 has opened, but not an earlier one."""
        previous_error = ""
        while True:
            if self._place.enter(self._own.rank, self._deadline):
                try:
                    verdict = _read(self._place.store, _VERDICT)
                except RuntimeError:
                    # This was the store of the previous world, which has just ended.
                    verdict = {"text": "its store is gone"}
                names = self._try_to_join(verdict)
                if names is not None:
                    return names
                previous_error = (
                    f"; the last one ended: {verdict['text']}" if "text" in verdict else ""
                )
            if self._remaining_s() == 0:
                raise RpcError(
                    f"rank {self._own.rank} found no world to join at {self._place.where} within "
                    f"{self._timeout_s:g} s: rank 0 has not opened one{previous_error}"
                )
            time.sleep(_RETRY_S)

    def _collect(self, store: Store) -> dict[int, str]:
        names: dict[int, str] = {}
        for rank, key in enumerate(self._keys):
            other = _read(store, key) if self._wait_for(store, key) else {}
            if not other:
                if not self._place.is_current():
                    raise ValueError(f"another rank 0 has opened a world at {self._place.where}")
                self._raise_missing(store)
            _check_name(other["name"], rank)
            for setting, ours in self._own.settings.items():
                theirs = other["settings"][setting]
                if theirs != ours:
                    raise ValueError(
                        f"{setting} must be the same everywhere: it is {ours!r} in rank 0 "
                        f"({self._own.name!r}), {theirs!r} in rank {rank} ({other['name']!r})"
                    )
            namesake = next(
                (member_rank for member_rank, name in names.items() if name == other["name"]), None
            )
            if namesake is not None:
                raise ValueError(
                    f"names must differ: ranks {namesake} and {rank} are both called "
                    f"{other['name']!r}"
                )
            names[rank] = other["name"]
        return names

    def _try_to_join(self, verdict: dict[str, Any]) -> dict[int, str] | None:
        """Join the current world; return None if it has begun or ended without this process."""
        meeting, store, rank = self._place, self._place.store, self._own.rank
        if verdict:
            is_error = verdict.get("error") == "ValueError" and not meeting.outlives_world
            if is_error and not store.check([self._keys[rank]]):
                # Rank 0 still keeps the store for members that have not read the error.
                _raise_verdict(store, verdict)
            return None
        # The first process that claims a rank gets it.
        claim = store.compare_set(self._keys[rank], "", self._entry).decode()
        if claim != self._entry:
            self._wait_for_other(store, json.loads(claim)["name"])
            return None
        try:
            is_decided = self._wait_for(store, _VERDICT)
            if not is_decided and meeting.is_current():
                self._raise_missing(store)
        except BaseException:
            # Free the rank, because this process may try again before rank 0 gives up.
            with contextlib.suppress(RuntimeError):
                store.delete_key(self._keys[rank])
            raise
        return self._follow_verdict(store) if is_decided else None

    def _follow_verdict(self, store: Store) -> dict[int, str]:
        verdict = _read(store, _VERDICT)
        if "error" in verdict:
            _raise_verdict(store, verdict)
        names = {int(rank): name for rank, name in verdict["names"].items()}
        if len(names) != self._world_size:
            raise ValueError(
                f"world_size must be the same everywhere: it is {len(names)} in rank 0 "
                f"({names[0]!r}), {self._world_size} here"
            )
        return names

    def _wait_for_other(self, store: Store, other: str) -> None:
        """Raise ValueError because another process has this rank.

        Return if the store outlives its worlds and rank 0 has opened another one meanwhile.
        """
        if self._place.outlives_world:
            is_decided = self._wait_for(store, _VERDICT)
            if not is_decided and not self._place.is_current():
                return
        raise ValueError(
            f"rank {self._own.rank} of the world is already taken by {other!r}, so "
            f"{self._own.name!r} cannot have it"
        )

    def _wait_for(self, store: Store, key: str) -> bool:
        """Wait for a key; return False at the deadline, or if another world has been opened."""
        while not wait_for_key(store, key, min(_POLL_S, self._remaining_s())):
            if self._remaining_s() == 0 or not self._place.is_current():
                return False
        return True

    def _raise_missing(self, store: Store) -> NoReturn:
        members = {str(rank): _read(store, key) for rank, key in enumerate(self._keys)}
        joined = [f"{rank} ({entry['name']!r})" for rank, entry in members.items() if entry]
        missing = [rank for rank, entry in members.items() if not entry]
        if not missing:
            raise RpcError(
                f"the world is incomplete: rank 0 at {self._place.where} has not answered "
                f"within {self._timeout_s:g} s"
            )
        raise RpcError(
            f"the world is incomplete: these of its {self._world_size} ranks did not join within "
            f"{self._timeout_s:g} s: {', '.join(missing)}; joined: {', '.join(joined)}"
        )

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _check_name(name: object, rank: int) -> None:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return
    shown = repr(name)
    if len(shown) >= 80:
        shown = f"{shown[:60]}... ({len(str(name))} long)"
    raise ValueError(
        f"rank {rank}: a name must be 1 to 127 of the letters a-z and A-Z, digits, underscores, "
        f"colons and dashes, got {shown}"
    )


def _read(store: Store, key: str) -> dict[str, Any]:
    """Return the entry under a key, {} if there is none."""
    if not store.check([key]):
        return {}
    # The value is empty if its writer has just deleted it.
    content: dict[str, Any] = json.loads(store.get(key) or "{}")
    return content


def _raise_verdict(store: Store, verdict: dict[str, Any]) -> NoReturn:
    store.add("seen", 1)
    raise (ValueError if verdict["error"] == "ValueError" else RpcError)(verdict["text"])


def wait_for_readers(store: Store, rank: int, count: int) -> None:
    """Count this member as a reader of the store; as rank 0, wait for ``count`` readers.

    Rank 0 waits because the store ends with it, but for at most ``_LINGER_S``.
    """
    store.add("seen", 1)
    deadline = time.monotonic() + _LINGER_S
    while rank == 0 and store.add("seen", 0) < count and time.monotonic() < deadline:
        time.sleep(0.01)


# The steps of starting a world, and their names in errors.
_STEPS = {"collectives": "process group", "calls": "RPC"}
_HOSTS_HINT = (
    "; all sockets listen on the loopback interface: if the members are on several hosts, set "
    "TP_SOCKET_IFNAME on each host to the interface that reaches the others"
)


@contextlib.contextmanager
def joint_step(
    meeting: MeetingPlace, step: str, rank: int, names: Mapping[int, str]
) -> Iterator[None]:
    """Run a step that all members take together; every member must call this.

    Raises:
        RpcError: the step failed; the text names the members that did not take it.
    """
    store = meeting.store
    try:
        yield
        store.set(f"{step}_{rank}", "1")
    except RpcError:
        raise
    except (RuntimeError, OSError) as error:
        failure = f"the {_STEPS[step]} of the world could not be started"
        with naming_store(meeting, failure):
            store.set(f"{step}_{rank}", "1")
            # All living members end or fail at about the same time.
            deadline = time.monotonic() + _LAST_S
            while (missing := _missing(store, step, names)) and time.monotonic() < deadline:
                time.sleep(0.01)
            wait_for_readers(store, rank, len(names) - len(missing))
        absent = f"{names_and_verb(missing)} not arrived; " if missing else ""
        reason = str(error).strip().partition("\n")[0]
        is_loopback = os.environ.get("GLOO_SOCKET_IFNAME") == "lo"
        hint = _HOSTS_HINT if meeting.is_assumed_local and is_loopback else ""
        raise RpcError(f"{failure}: {absent}{reason}{hint}") from error


def leave_together(
    meeting: MeetingPlace, rank: int, names: Mapping[int, str], timeout_s: float
) -> None:
    """Wait until every member of a world without RPC has called this."""
    store = meeting.store
    deadline = time.monotonic() + timeout_s
    with naming_store(meeting, "World.stop()"):
        store.set(f"left_{rank}", "1")
        try:
            for member_rank in names:
                if not wait_for_key(store, f"left_{member_rank}", deadline - time.monotonic()):
                    missing = names_and_verb(_missing(store, "left", names))
                    raise RpcError(f"World.stop(): {missing} not arrived within {timeout_s:g} s")
        finally:
            # If rank 0 is gone already, this member has nothing left to read.
            with contextlib.suppress(RuntimeError):
                wait_for_readers(store, rank, len(names) - len(_missing(store, "left", names)))


def _missing(store: Store, step: str, names: Mapping[int, str]) -> list[str]:
    return [name for rank, name in names.items() if not store.check([f"{step}_{rank}"])]
