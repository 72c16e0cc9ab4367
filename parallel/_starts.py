"""Starts the processes of a pool's workers."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from . import _link as link
from . import _worker
from ._deaths import ends_by_itself, how_it_ended, start_error
from ._encoder import Encoder
from ._lane import Lane
from .errors import BrokenPoolError
from .transport.wire import release

_log = logging.getLogger(__name__)
# So many starts fail before the next is put off, or the pool gives up.
_MOST_FAILED = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 1.0
# What a start raises for a fork server that was killed meanwhile, and at the limits of the system.
START_ERRORS = (OSError, EOFError)


@dataclass
class Plan:
    """How a pool's workers are to be, and what becomes of their tasks.

    Attributes:
        context: a multiprocessing context.
        start_method: its name.
        initializers: per worker, the function it begins with, and its arguments.
        work: the pool's `worker`.
        maxtasks: tasks until a worker is replaced.
        is_daemon: whether workers may not have children of their own.
        copy_tensor: whether tensors are copied, or passed by reference.
        recurse: see `pickling.Pickler`.
        retries: how often a task that was lost is run again.
        task_timeout: seconds after which a task's worker is killed.
        start_patience_s: see `pool.Pool`.
    """

    context: BaseContext
    start_method: str
    initializers: Sequence[tuple[Callable[..., object] | None, Sequence[Any]]]
    work: Callable[..., None] = _worker.worker
    maxtasks: int | None = None
    is_daemon: bool = True
    copy_tensor: bool = True
    recurse: bool = False
    retries: int = 0
    task_timeout: float | None = None
    start_patience_s: float = 60.0


class FailedStarts:
    """Starts that have failed since a worker was ready, or was lost that had been.

    What a worker does by itself, the next one would do as well. One that is killed may have been in
    somebody's way, or memory was scarce for a moment: then the next ones are given time.

    Args:
        plan: how the workers are to be.

    Attributes:
        next_at: when the next worker is to be started (monotonic seconds), 0 for at once.
    """

    def __init__(self, plan: Plan) -> None:
        self._start_method = plan.start_method
        self._patience_s = plan.start_patience_s
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.next_at = 0.0
        # Of both causes: how many, and when the first was.
        self._counts: dict[bool, tuple[int, float]] = {}

    def add_death(self, exitcode: int | None, *, is_only: bool) -> BrokenPoolError | None:
        """Count a worker that ended before it was ready; return what the pool is to end with.

        Args:
            is_only: no other worker is ready.
        """
        by_itself = ends_by_itself(exitcode, self._start_method)
        return self._add(how_it_ended(exitcode), by_itself=by_itself, is_only=is_only)

    def add_error(self, error: BaseException, *, is_only: bool) -> BrokenPoolError | None:
        """Count a process that could not be started; return what the pool is to end with."""
        how = f"could not be started: {error!r}"
        broken = self._add(how, by_itself=False, is_only=is_only)
        if broken is not None:
            broken.__cause__ = error
        return broken

    def _add(self, how: str, *, by_itself: bool, is_only: bool) -> BrokenPoolError | None:
        now = time.monotonic()
        count, since = self._counts.get(by_itself, (0, now))
        count += 1
        self._counts[by_itself] = count, since
        if count < _MOST_FAILED:
            return None
        if is_only and (by_itself or now - since >= self._patience_s):
            return start_error(count, how, now - since)
        if count == _MOST_FAILED:
            _log.warning("%d workers of a pool ended while they started; the last %s", count, how)
        delay_s = _FIRST_DELAY_S * 2 ** min(count - _MOST_FAILED, 16)
        self.next_at = now + min(delay_s, _LONGEST_DELAY_S)
        return None


class Counters:
    """The shared memory in which workers say what they have begun."""

    def __init__(self, workers: int) -> None:
        self.fd = os.memfd_create("stepwrap-pool", os.MFD_CLOEXEC)
        size = workers * link.COUNTER.size
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()
        os.close(self.fd)


def start_lane(
    plan: Plan, slot: int, counters: Counters, encoder: Encoder, *, forked_close: Sequence[int]
) -> Lane:
    """Start a worker. To be called in the pool's thread: workers end with the thread they are of.

    Args:
        forked_close: what is open in the pool besides the lane, for a forked worker to close.

    Raises:
        Exception: the process cannot be started, or its initializer not be pickled.
    """
    lane = Lane(slot, counters.memory, plan.maxtasks)
    try:
        settings = _worker.Settings(
            *lane.pipes.theirs, counters.fd, slot=slot, work=plan.work, maxtasks=plan.maxtasks
        )
        settings.start_method = plan.start_method
        settings.is_timed = plan.task_timeout is not None
        settings.copy_tensor, settings.recurse = plan.copy_tensor, plan.recurse
        if plan.start_method == "fork":
            settings.initializer = plan.initializers[slot]
            settings.to_close = [*forked_close, *lane.pipes.fds]
        else:
            packed = encoder.pack(plan.initializers[slot])
            try:
                lane.pipes.begin(packed)
            finally:
                release(packed)
        process = plan.context.Process(  # type: ignore[attr-defined]
            target=_worker.main,
            args=(settings,),
            name=f"PoolWorker-{slot}",
            daemon=plan.is_daemon,
        )
        process.start()
        lane.started(process, is_child=plan.start_method != "forkserver")
    except BaseException:
        lane.close()
        raise
    return lane
