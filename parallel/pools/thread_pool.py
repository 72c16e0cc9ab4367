"""Pools of threads, with the calls of pools of processes. Everything is passed by reference."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BrokenPoolError
from .base_pool import BasePool
from .pool import contexts_of
from .worker import WithContext, enter

__all__ = ["CtxThreadPool", "ThreadPool"]


class ThreadPool(BasePool):
    """A pool of threads of this process.

    Functions, arguments, results and errors are passed as they are. Threads cannot be killed:
    `terminate` drops what has not begun and does not wait for the rest; `join` does.

    Args:
        processes: threads (default: as many as the machine has cores).
        initializer: called in each thread first, with `initargs`; if it fails the pool is broken.
        maxtasksperchild: tasks after which a thread is replaced; None: never.
        is_recursive: of pools of processes; has no effect here, nor have the following.
    """

    _is_waited = False

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
    ) -> None:
        super().__init__(processes, initializer, initargs, maxtasksperchild)

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the queue of tasks and the queue of results."""
        return queue.SimpleQueue(), queue.SimpleQueue()

    def repopulate_pool(self) -> None:
        """Start the threads that are missing."""
        for slot in range(self._processes):
            if slot >= len(self._workers):
                self._workers.append(self._started(slot))
            elif not self._workers[slot].is_alive():
                self._workers[slot] = self._started(slot)

    def maintain_pool(self) -> None:
        """Replace threads that have ended.

        Raises:
            BrokenPoolError: the initializer has failed in one.
        """
        for thread in self._workers:
            if thread.failure is not None:
                text = "".join(traceback.format_exception(thread.failure)).rstrip()
                message = f"the pool is broken: the initializer failed in {thread.name}:\n{text}"
                raise BrokenPoolError(message) from thread.failure
        self.repopulate_pool()

    def terminate_workers(self) -> None:
        """Drop the tasks that have not begun; the threads end after those that have."""
        _end_threads(self._inqueue, self._workers)

    def join_workers(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._workers:
            thread.join()

    def terminate(self) -> None:
        """Drop what has not begun; results that are not there fail with `PoolTerminatedError`.

        Does not wait for tasks that are running: `join` does.
        """
        self._monitor.stop()
        self._monitor.wait_failed()

    def _started(self, slot: int) -> _Thread:
        initializer, initargs = self._initializer_of(slot)
        thread = _Thread(self, initializer, initargs)
        thread.start()
        return thread

    def _initializer_of(self, slot: int) -> tuple[Callable[..., object] | None, Sequence[Any]]:
        return self._initializer, self._initargs

    def _waker(self) -> Callable[[], None]:
        outqueue = self._outqueue
        # A result of no call.
        return lambda: outqueue.put((-1, 0, (True, None)))

    def _ender(self) -> Callable[[], None]:
        inqueue, threads = self._inqueue, self._workers
        return lambda: _end_threads(inqueue, threads)


class CtxThreadPool(ThreadPool):
    """A pool whose threads call functions with their context first: `func(ctx, *args, **kwargs)`.

    Args:
        processes: threads.
        initializer: called in each thread first, with `initargs`.
        worker_contexts: one for each thread (default: None for all).

    Raises:
        ValueError: there are more contexts than threads, or fewer.
    """

    _local = threading.local()

    def __init__(
        self,
        processes: int | None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        worker_contexts: Sequence[Any] | None = None,
    ) -> None:
        self._contexts = worker_contexts
        super().__init__(processes, initializer, initargs)

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the queue of tasks and the queue of results."""
        self._contexts = contexts_of(self._contexts, self._processes)
        return super().setup_queues()

    def _initializer_of(self, slot: int) -> tuple[Callable[..., object] | None, Sequence[Any]]:
        context = None if self._contexts is None else self._contexts[slot]
        return enter, (self._local, context, self._initializer, self._initargs)

    def _prepared(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return WithContext(func, self._local)


class _Thread(threading.Thread):
    """A worker. It holds the queues, not the pool."""

    def __init__(
        self,
        pool: BasePool,
        initializer: Callable[..., object] | None,
        initargs: Sequence[Any],
    ) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self._work = pool.worker
        self._begin = (initializer, initargs)
        self._ends = (pool._inqueue.get, pool._outqueue.put)
        self._maxtasks = pool._maxtasksperchild

    def run(self) -> None:
        """Run tasks until there are none."""
        initializer, initargs = self._begin
        try:
            if initializer is not None:
                initializer(*initargs)
        except BaseException as error:
            self.failure = error
            return
        self._work(*self._ends, None, (), self._maxtasks)


def _end_threads(inqueue: queue.SimpleQueue[Any], threads: Sequence[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            inqueue.get_nowait()
    for _ in threads:
        inqueue.put(None)
