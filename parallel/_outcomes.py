"""What workers have written, as values and errors; and what becomes of tasks that are lost."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from . import _link as link
from ._deaths import death_error
from ._encoder import Task
from ._lane import Lane
from ._remote_errors import rebuild
from .errors import EncodingError, RemoteError
from .transport.wire import unpack


def outcome(kind: int, value: Any) -> tuple[bool, Any]:
    """Return (True, value) or (False, error) of what a worker has written."""
    try:
        if kind == link.VALUE:
            if type(value) is bytes:
                return True, pickle.loads(value) if value[0] == link.PICKLE else unpack(value)
            data, fds = value
            if isinstance(fds, OSError):
                raise fds
            return True, unpack(data, fds)
        if kind == link.ERROR:
            return False, rebuild(value)
        texts = pickle.loads(value)
        return False, EncodingError(*texts) if kind == link.NOT_ENCODED else RemoteError(*texts)
    # Loading runs the code of classes.
    except BaseException as error:
        return False, error


class Losses:
    """Tasks that have ended with their worker.

    Args:
        retries: how often a task is run again.
        timeout: what a task has that is killed for its time.
        calls: the pool's unfinished calls by number, which know the names of tasks.
    """

    def __init__(self, retries: int, timeout: float | None, calls: Mapping[int, Any]) -> None:
        self._retries = retries
        self._timeout = timeout
        self._calls = calls
        self._tries: dict[tuple[int, int], int] = {}

    def settle(self, lane: Lane, task: Task, exitcode: int | None) -> BaseException | None:
        """Return the error of a lost task, None where it is to be run again."""
        job, chunk = task[:2]
        tries = self._tries.pop((job, chunk), 0)
        if tries < self._retries:
            self._tries[job, chunk] = tries + 1
            return None
        call = self._calls.get(job)
        name = f"task {chunk}" if call is None else call.task_name(chunk)
        timeout = self._timeout if lane.is_overdue else None
        return death_error(name, lane.slot, lane.pid, exitcode, timeout)

    def answered(self, job: int, chunk: int) -> None:
        """Forget the tries of a task that came through."""
        if self._tries:
            self._tries.pop((job, chunk), None)
