"""The lock that keeps other runs out of a remote run folder."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from typing import Any

from ..rank_processes import host_identity, is_running
from .stores import RemoteError, Store

# The name of the lock in the run folder.
LOCK = "run.lock"
# How often the owner refreshes the lock, and after how long without it the owner counts as dead.
REFRESH_S, STALE_S = 30.0, 300.0
# How long to wait before a new lock is read again: another run may have written it at the same
# time, and some stores show a new object late.
SETTLE_S = 1.0


class RemoteLock:
    """An object in the run folder that names its owner, who refreshes it.

    Args:
        store: the run folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._token = uuid.uuid4().hex
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._refreshed_s = 0.0

    def acquire(self) -> None:
        """Write the lock.

        Raises:
            BlockingIOError: another run holds it; the message names its process.
        """
        if problem := lock_problem(self._store):
            raise BlockingIOError(problem)
        if _read(self._store):
            # It is stale.
            self._store.delete(LOCK)
        is_new = self._store.create(LOCK, self._content())
        time.sleep(SETTLE_S)
        about = _read(self._store)
        if not is_new or about.get("token") != self._token:
            raise BlockingIOError(f"{self._store.url} is in use by {_owner(about)}")
        self._refreshed_s = time.monotonic()

    def refresh(self) -> None:
        """Write the lock again if that is due.

        Raises:
            RemoteError: another run has taken it.
        """
        if time.monotonic() - self._refreshed_s < REFRESH_S:
            return
        self.require_own()
        self._store.write(LOCK, self._content())
        self._refreshed_s = time.monotonic()

    def require_own(self) -> None:
        """Raise RemoteError if another run has taken the lock."""
        about = _read(self._store)
        if about and about.get("token") != self._token:
            raise RemoteError(
                f"{self._store.url} has been taken over by {_owner(about)}, because this run did "
                f"not reach it for {STALE_S / 60:.0f} minutes; this run uploads nothing more"
            )

    def release(self) -> None:
        """Delete the lock, unless another run has taken it."""
        if _read(self._store).get("token") == self._token:
            self._store.delete(LOCK)

    def _content(self) -> bytes:
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since,
            "host_identity": host_identity(),
            "token": self._token,
            "refreshed": time.time(),
        }
        return json.dumps(about).encode()


def lock_problem(store: Store) -> str:
    """Return which run uses a folder and what to do, or "" if none does."""
    about = _read(store)
    if not about or (about.get("host_identity") == host_identity() and not _runs(about)):
        return ""
    age_s = store.age_s(LOCK)
    if age_s is None:
        refreshed = about.get("refreshed")
        age_s = time.time() - refreshed if isinstance(refreshed, float) else 0.0
    if age_s > STALE_S:
        return ""
    return (
        f"{store.url} is in use by {_owner(about)}; wait until it ends, or use another folder. If "
        f"it has ended without removing its lock, the lock counts for {STALE_S / 60:.0f} minutes "
        f"after its last refresh, {max(age_s, 0.0):.0f} s ago; to free the folder at once, delete "
        f"{store.url}/{LOCK}"
    )


def _runs(about: dict[str, Any]) -> bool:
    pid = about.get("pid")
    return isinstance(pid, int) and is_running(pid)


def _read(store: Store) -> dict[str, Any]:
    """Return the content of the lock; {} if there is none."""
    content = store.read(LOCK)
    if content is None:
        return {}
    try:
        about = json.loads(content)
    except ValueError:
        about = None
    return about if isinstance(about, dict) and about else {"host": "unknown", "pid": "unknown"}


def _owner(about: dict[str, Any]) -> str:
    names = [str(about.get(key, "unknown")) for key in ("pid", "host", "since")]
    return "process {} on {}, since {}".format(*names)
