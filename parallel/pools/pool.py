"""The pools of processes and of threads: `BasePool` with options, contexts, or threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BrokenPoolError, TimeoutError
from .base_pool import BasePool
from .worker import CtxPoolStorage, WithContext, enter

__all__ = ["CtxPool", "CtxThreadPool", "P2PPool", "Pool", "ThreadPool"]

Beginnings = list[tuple[Callable[..., object] | None, Sequence[Any]]]


class Pool(BasePool):
    """A pool of processes. A worker that dies loses the task it was running and nothing else.

    Tasks go to whichever worker is free. Functions and arguments may be anything that
    `pickling.dumps` takes, lambdas and local functions among them.

    Args:
        processes: this, `initializer`, `initargs` and `maxtasksperchild` are those of `BasePool`.
        is_recursive: see `pickling.Pickler`.
        is_daemon: False lets tasks start processes of their own.
        is_copy_tensor: whether workers get copies of tensors, in functions, arguments and results,
            or the same memory.
        share_method: "cpu" or "cuda", where tensors are not copied.
        retries: how often a task is run again whose worker has died.
        task_timeout: seconds that a task may run; then its worker is killed and replaced.
        start_method: "spawn" (default), "forkserver" or "fork". In forked workers torch, where it
            is loaded, keeps to one thread.

    Attributes:
        start_patience_s: seconds in which a worker has to become ready where others are killed, or
            cannot be started, before they are; then the pool is broken. A subclass may set it.

    Raises:
        RuntimeError: tensors are not copied and `share_method` is neither of the two.
        BrokenPoolError: (by calls) the initializer fails, or workers die before they are ready.
        WorkerDiedError: (by results) the task's worker died, or took too long (`TaskTimeoutError`).
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
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
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
    """`Pool` under another name: there, too, each worker has a pipe, and so a queue, of its own."""


class _InContexts(BasePool):
    """Workers begin with a context each, and call functions with it."""

    _holder: Any = CtxPoolStorage
    _contexts: Sequence[Any] | None

    def _beginnings(self) -> Beginnings:
        beginnings = super()._beginnings()
        contexts = [None] * len(beginnings) if self._contexts is None else self._contexts
        if len(contexts) != len(beginnings):
            raise ValueError(
                "Context number is not equal to the number of pool workers. There are "
                f"{len(contexts)} contexts, {len(beginnings)} workers"
            )
        return [
            (enter, (self._holder, context, *beginning))
            for context, beginning in zip(contexts, beginnings, strict=True)
        ]

    def _prepared(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return WithContext(func, self._holder)


class CtxPool(_InContexts, Pool):
    """A pool whose workers call functions with their context first: `func(ctx, *args, **kwargs)`.

    Args:
        processes: workers.
        initializer: called in each worker first, with `initargs`; it finds the context in
            `CtxPoolStorage.storage`.
        worker_contexts: one for each worker (default: None for all). A worker that is replaced
            leaves its place to one that gets the same context afresh.

    The other arguments, and the errors, are those of `Pool`.

    Raises:
        ValueError: there are more contexts than workers, or fewer.
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

    Functions, arguments, results and errors are passed as they are. Threads cannot be killed:
    `terminate` drops what has not begun and does not wait for the rest; `join` does.

    Args: as of `BasePool`, of threads; `is_recursive` and what follows it have no effect.
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

    def terminate(self) -> None:
        """Drop what has not begun; results that are not there fail with `PoolTerminatedError`."""
        self._monitor.stop()
        self._monitor.wait_failed()

    def _make_engine(self) -> Any:
        return Threads(self._beginnings(), self.worker, self._maxtasksperchild)


class CtxThreadPool(_InContexts, ThreadPool):
    """A pool whose threads call functions with their context first: `func(ctx, *args, **kwargs)`.

    Args: as of `BasePool`; `worker_contexts` has one for each thread (default: None for all).

    Raises:
        ValueError: there are more contexts than threads, or fewer.
    """

    _holder = threading.local()

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
    """The threads of a pool, with the methods of a `Dispatcher`. They hold this, not the pool."""

    def __init__(
        self, beginnings: Beginnings, work: Callable[..., None], maxtasks: int | None
    ) -> None:
        self._beginnings = beginnings
        self._work = work
        self._maxtasks = maxtasks
        self._threads: dict[int, threading.Thread] = {}
        # Places without a thread, or with one that is ending.
        self._vacant = set(range(len(beginnings)))
        # In which thread an initializer has failed, and with what.
        self._failure: tuple[str, BaseException] | None = None
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Between which threads work: a pool may have its own.
        self.queues: tuple[Any, Any] = self._tasks, self._results
        self.put = self._tasks.put

    def get(self, timeout: float | None = None) -> Any:
        """Return the next result."""
        result = self._results.get(timeout=timeout)
        if result is None:
            raise TimeoutError("the pool's threads need care")
        return result

    def wake(self) -> None:
        """Make `get` return to the pool."""
        self._results.put(None)

    def size(self) -> int:
        return sum(thread.is_alive() for thread in self._threads.values())

    def repopulate(self) -> None:
        """Start the threads that are missing."""
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
        """Drop the tasks that have not begun; the threads end after those that have."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads.values():
            thread.join()

    def _run(self, slot: int) -> None:
        tasks, results = self.queues
        initializer, initargs = self._beginnings[slot]
        try:
            if initializer is not None:
                initializer(*initargs)
        except BaseException as error:
            self._failure = threading.current_thread().name, error
        else:
            self._work(tasks.get, results.put, None, (), self._maxtasks)
        finally:
            self._vacant.add(slot)
            self.wake()
