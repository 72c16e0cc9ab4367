"""Pools of processes and of threads: ``BasePool`` with options, contexts, or threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..arguments import seconds, whole_number
from ..errors import BrokenPoolError, TimeoutError
from .base_pool import BasePool
from .worker import WithContext, enter

__all__ = ["CtxPool", "CtxThreadPool", "P2PPool", "Pool", "ThreadPool"]

Initializers = list[tuple[Callable[..., object] | None, Sequence[Any]]]


class Pool(BasePool):
    """A pool of processes. If a worker dies, only the task that it was running is lost.

    Each task goes to the worker with the fewest tasks. Functions and arguments may be anything that
    ``dumps`` can pickle, including lambdas and local functions.

    ``BasePool`` describes the first four arguments.

    Args:
        is_recursive: whether all functions of the main script are sent by value, with the globals
            that they use (``recurse`` of ``Pickler``).
        is_daemon: whether workers are daemons; ``multiprocessing`` lets tasks start processes only
            if it is False.
        is_copy_tensor: whether tensors in functions, arguments and results are copied; False
            shares their memory.
        share_method: "cpu" or "cuda", required if tensors are not copied. Both have the same
            effect: each tensor is shared on its own device.
        retries: how often a task is run again if its worker has died or was too slow.
        task_timeout: the number of seconds after which the worker of a running task is killed and
            replaced (default: no limit).
        start_method: "spawn" (default), "forkserver" or "fork". In forked workers torch uses one
            thread, if it is imported.

    Attributes:
        start_patience_s: how long the pool retries failed starts while no worker is ready, in
            seconds. Then the pool is broken. It applies if workers are killed while they start, or
            if a replacement for a worker cannot be started. A subclass may set it.

    Raises:
        RuntimeError: tensors are not copied and ``share_method`` is not "cpu" or "cuda".
        ValueError: ``retries`` is negative, or ``task_timeout`` is not positive.
        BrokenPoolError: raised by calls if the initializer fails or workers die before they are
            ready.
        WorkerDiedError: raised by results if the task's worker died, or the task took too long
            (``TaskTimeoutError``).
    """

    start_patience_s = 60.0

    def __init__(  # noqa: PLR0913
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
        *,
        retries: int = 0,
        task_timeout: float | None = None,
        start_method: str | None = None,
    ) -> None:
        if not is_copy_tensor and share_method not in ("cpu", "cuda"):
            raise RuntimeError(
                f'Invalid share method: "{share_method}"; is_copy_tensor=False takes share_method='
                '"cpu" or "cuda"'
            )
        retries = whole_number("retries", retries, minimum=0)
        task_timeout = seconds("task_timeout", task_timeout)
        if task_timeout is not None and task_timeout <= 0:
            raise ValueError(f"task_timeout must be more than 0 s, got {task_timeout}")
        self._options = {
            "is_daemon": is_daemon,
            "copy_tensor": is_copy_tensor,
            "recurse": is_recursive,
            "retries": retries,
            "task_timeout": task_timeout,
            "start_patience_s": self.start_patience_s,
        }
        context = multiprocessing.get_context(start_method or "spawn")
        super().__init__(processes, initializer, initargs, maxtasksperchild, context)


class P2PPool(Pool):
    """The same as ``Pool``. The name exists for compatibility with the machin library."""


class _InContexts(BasePool):
    """A pool with one context per worker; functions get the context as their first argument."""

    _is_of_threads = False
    _contexts: Sequence[Any] | None

    def _initializers(self) -> Initializers:
        initializers = super()._initializers()
        contexts = [None] * len(initializers) if self._contexts is None else self._contexts
        if len(contexts) != len(initializers):
            raise ValueError(
                "Context number is not equal to the number of pool workers. There are "
                f"{len(contexts)} contexts, {len(initializers)} workers"
            )
        return [
            (enter, (self._is_of_threads, context, *beginning))
            for context, beginning in zip(contexts, initializers, strict=True)
        ]

    def _bind_context(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return WithContext(func)


class CtxPool(_InContexts, Pool):
    """A pool with one context per worker, which calls ``func(ctx, *args, **kwargs)``.

    ``Pool`` describes the other arguments and the errors.

    Args:
        initializer: called first in each worker, with ``initargs``; it finds the context in
            ``CtxPoolStorage.storage``.
        worker_contexts: one context per worker (default: None for all). A worker that replaces
            another one gets a new copy of the same context.

    Raises:
        ValueError: the numbers of contexts and workers differ.
    """

    def __init__(  # noqa: PLR0913
        self,
        processes: int | None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        worker_contexts: Sequence[Any] | None = None,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
        *,
        retries: int = 0,
        task_timeout: float | None = None,
        start_method: str | None = None,
    ) -> None:
        self._contexts = worker_contexts
        super().__init__(
            processes,
            initializer,
            initargs,
            maxtasksperchild,
            is_recursive,
            is_daemon,
            is_copy_tensor,
            share_method,
            retries=retries,
            task_timeout=task_timeout,
            start_method=start_method,
        )


class ThreadPool(BasePool):
    """A pool of threads of this process.

    Functions, arguments, results and errors are passed unchanged. Threads cannot be killed:
    ``terminate`` drops the tasks that have not started; ``join`` waits for the running ones.

    ``BasePool`` describes the first four arguments; the others have no effect.
    """

    _joins_at_exit = False

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

    def terminate(self) -> None:
        """Drop tasks that have not started; unfinished calls fail with ``PoolTerminatedError``."""
        if self._monitor.process == os.getpid():
            self._monitor.stop()
            self._monitor.wait_failed()

    def _make_engine(self) -> Any:
        return Threads(self._initializers(), self.worker, self._maxtasksperchild)


class CtxThreadPool(_InContexts, ThreadPool):
    """A pool with one context per thread, which calls ``func(ctx, *args, **kwargs)``.

    ``BasePool`` describes the other arguments.

    Args:
        initializer: called first in each thread, with ``initargs``; it finds the context in
            ``CtxPoolStorage.storage``.
        worker_contexts: one context per thread (default: None for all).

    Raises:
        ValueError: the numbers of contexts and threads differ.
    """

    _is_of_threads = True

    def __init__(
        self,
        processes: int | None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        worker_contexts: Sequence[Any] | None = None,
    ) -> None:
        self._contexts = worker_contexts
        super().__init__(processes, initializer, initargs)


class Threads:
    """The threads of a pool, with the methods of a ``Dispatcher``.

    The threads refer to this object, not to the pool, which can therefore be collected.
    """

    def __init__(
        self, initializers: Initializers, work: Callable[..., None], maxtasks: int | None
    ) -> None:
        self._initializers = initializers
        self._work = work
        self._maxtasks = maxtasks
        self._threads: dict[int, threading.Thread] = {}
        # The slots without a thread, or with one that is ending.
        self._vacant = set(range(len(initializers)))
        # The name of the thread whose initializer has failed, and the error.
        self._failure: tuple[str, BaseException] | None = None
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A pool that overrides `setup_queues` replaces these.
        self.queues: tuple[Any, Any] = self._tasks, self._results
        self.put = self._tasks.put
        self._is_terminated = False

    def get(self, timeout: float | None = None) -> Any:
        """Return the next result."""
        result = self._results.get(timeout=timeout)
        if result is None:
            raise TimeoutError("the pool's threads need maintenance")
        return result

    def wake(self) -> None:
        """Make ``get`` raise, so that the pool's thread does maintenance."""
        self._results.put(None)

    def size(self) -> int:
        return sum(thread.is_alive() for thread in self._threads.values())

    def repopulate(self) -> None:
        """Start the missing threads."""
        if self._failure is not None:
            name, failure = self._failure
            text = "".join(traceback.format_exception(failure)).rstrip()
            message = f"the pool is broken: the initializer failed in {name}:\n{text}"
            raise BrokenPoolError(message) from failure
        for slot in tuple(self._vacant):
            self._vacant.discard(slot)
            self._threads[slot] = threading.Thread(target=self._run, args=(slot,), daemon=True)
            self._threads[slot].start()

    def terminate(self) -> None:
        """Drop the tasks that have not started; the threads end after the running tasks."""
        self._is_terminated = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        # Wake the threads that wait for a task. Their queue is `queues[0]`: a subclass may have
        # replaced `_tasks`.
        for _ in range(self.size()):
            self.queues[0].put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads.values():
            thread.join()

    def _run(self, slot: int) -> None:
        tasks, results = self.queues

        def get() -> Any:
            task = tasks.get()
            return None if self._is_terminated else task

        initializer, initargs = self._initializers[slot]
        try:
            if initializer is not None:
                initializer(*initargs)
        except BaseException as error:
            self._failure = threading.current_thread().name, error
        else:
            self._work(get, results.put, None, (), self._maxtasks)
        finally:
            self._vacant.add(slot)
            self.wake()
