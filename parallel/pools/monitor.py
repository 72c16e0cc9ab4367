"""The one thread of a pool: brings results to those who wait, and looks after the workers."""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from ..errors import BrokenPoolError, PoolTerminatedError
from ..interrupts import wait_free

_log = logging.getLogger(__name__)
_CHECK_S = 0.1
_EXIT_S = 5.0
# All that queues raise when there is nothing.
_NOTHING = (TimeoutError, multiprocessing.TimeoutError, queue.Empty)


class PoolStates(enum.Enum):
    """What a pool is doing: it takes calls, it ends what it has, or it has been stopped."""

    RUN = 0
    CLOSE = 1
    TERMINATE = 2


class Monitor:
    """A pool's thread and what it needs, which is not the pool: that may be collected.

    Args:
        pool: a `BasePool`.
        get: returns the next result within some seconds.
        wake: makes `get` return soon.
        end_workers: ends the workers of a pool that is no longer there.
        is_woken: whether `wake` is enough, and `get` may wait for ever.
        is_waited: whether the end of the program waits for the end of the workers.
    """

    def __init__(
        self,
        pool: Any,
        *,
        get: Callable[..., Any],
        wake: Callable[[], None],
        end_workers: Callable[[], None],
        is_woken: bool,
        is_waited: bool,
    ) -> None:
        self.phase = PoolStates.RUN
        self.broken: BaseException | None = None
        self.is_ended = False
        self.cache: dict[int, Any] = pool._cache
        self.wake = wake
        self._pool = weakref.ref(pool)
        self._get = get
        self._end_workers = end_workers
        self.is_waited = is_waited
        self._process = os.getpid()
        self._patience = None if is_woken else _CHECK_S
        self._start_error: BaseException | None = None
        # Locks that the thread lets go: a thread that is interrupted waiting for an Event may stop
        # others from setting it.
        self._starting, self._failing, self._running = (threading.Lock() for _ in range(3))
        for lock in (self._starting, self._failing, self._running):
            lock.acquire()
        self._thread = threading.Thread(target=self._run, name="stepwrap-pool", daemon=True)
        # Also at the end of the program: before multiprocessing waits for its children.
        util.Finalize(pool, _stop_at_exit, args=(self,), exitpriority=15)

    def start(self) -> None:
        """Start the thread, and through it the workers; raise what keeps them from starting."""
        self._thread.start()
        wait_free(self._starting)
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the pool, unless called by its own thread; return whether it came."""
        if threading.current_thread() is self._thread:
            return False
        # First: a thread whose join is interrupted is taken for ended.
        if self._thread.is_alive() and not wait_free(self._running, timeout):
            return False
        self._thread.join()
        return True

    def stop(self) -> None:
        """Have the thread end the pool now."""
        self.phase = PoolStates.TERMINATE
        self.wake()

    def wait_failed(self) -> None:
        """Wait until what a stopped pool did not get to has failed."""
        if threading.current_thread() is not self._thread:
            wait_free(self._failing)

    def check(self) -> None:
        """Raise if the pool takes no calls."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the pool is of process {self._process}, this is {os.getpid()}, forked from it: "
                "make the pool where it is used"
            )
        if self.broken is not None:
            raise BrokenPoolError(str(self.broken)) from self.broken
        if self.phase is not PoolStates.RUN:
            raise ValueError("Pool not running")

    def end_error(self) -> BaseException:
        """Return what calls end with that the pool did not get to."""
        if self.broken is not None:
            return self.broken
        return PoolTerminatedError("the pool was terminated before the result was there")

    def _run(self) -> None:
        try:
            self._supervise()
        finally:
            self._running.release()

    def _supervise(self) -> None:
        try:
            self._call("repopulate_pool")
        except BaseException as error:
            self._start_error = error
            self._end()
            return
        finally:
            self._starting.release()
        try:
            while self._settle():
                pass
        except BaseException as error:
            self.broken = error
            if not isinstance(error, BrokenPoolError):
                _log.exception("a pool has failed")
                self.broken = BrokenPoolError(f"the pool is broken: {error!r}")
                self.broken.__cause__ = error
            self._end()

    def _settle(self) -> bool:
        """Bring results to their calls until the pool needs care; return whether it goes on."""
        # Nobody tells that a call was interrupted which a closed pool waits for.
        patience = self._patience if self.phase is PoolStates.RUN else _CHECK_S
        get, cache = self._get, self.cache
        until = time.monotonic() + _CHECK_S
        while True:
            try:
                job, chunk, outcome = get(timeout=patience)
            except _NOTHING:
                return self._maintain()
            call = cache.get(job)
            if call is not None:
                call.set(chunk, outcome)
                # Not kept while waiting for the next one.
                del call
            del outcome
            if self.phase is not PoolStates.RUN and (
                not cache or self.phase is PoolStates.TERMINATE
            ):
                return self._maintain()
            if patience is not None and time.monotonic() > until:
                return self._maintain()

    def _maintain(self) -> bool:
        pool = self._pool()
        if pool is None or self.phase is PoolStates.TERMINATE:
            del pool
            self._end()
            return False
        if self.phase is PoolStates.CLOSE:
            for call in list(self.cache.values()):
                call.withdraw_interrupted()
        if self.phase is PoolStates.CLOSE and not self.cache and not pool._open_inputs:
            for _ in range(max(1, pool.size())):
                pool.pool_inqueue_put(None)
            pool.join_workers()
            self._fail_all()
            return False
        pool.maintain_pool()
        return True

    def _end(self) -> None:
        """Stop the workers; what is not done fails."""
        self.phase = PoolStates.TERMINATE
        self._fail_all()
        if self._pool() is None:
            self._end_workers()
            return
        for step in ("terminate_workers", "join_workers"):
            try:
                self._call(step)
            except BaseException:
                _log.exception("%s of a pool failed", step)

    def _fail_all(self) -> None:
        # Calls that come later see it and fail by themselves.
        is_first, self.is_ended = not self.is_ended, True
        for call in list(self.cache.values()):
            call.fail(self.end_error())
        if is_first:
            self._failing.release()

    def _call(self, method: str) -> None:
        pool = self._pool()
        if pool is not None:
            getattr(pool, method)()


def _stop_at_exit(monitor: Monitor) -> None:
    monitor.stop()
    # Not where a pool is collected: that may be in the middle of anything.
    if monitor.is_waited and util.is_exiting():
        monitor.join(_EXIT_S)
