"""Pools of processes: multiprocessing's calls, and every task ends in a value or an error."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .base_pool import BasePool
from .dispatcher import Dispatcher
from .scheduler import PerWorkerBacklog, SharedBacklog
from .worker import CtxPoolStorage, WithContext, enter
from .workers import Plan

__all__ = ["CtxPool", "P2PPool", "Pool", "contexts_of"]


class Pool(BasePool):
    """A pool of processes. A worker that dies loses the task it was running and nothing else.

    Tasks go to whichever worker is free. Functions and arguments may be anything that
    `pickling.dumps` takes, lambdas and local functions among them.

    Args:
        processes: workers (default: as many as the machine has cores).
        initializer: called in each worker first, with `initargs`; if it fails the pool is broken.
        maxtasksperchild: tasks after which a worker is replaced; None: never.
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
    _is_woken = True

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
        if not sys.platform.startswith("linux"):
            raise NotImplementedError(f"pools of processes need Linux, this is {sys.platform}")
        if not is_copy_tensor and share_method not in ("cpu", "cuda"):
            raise RuntimeError(
                f'Invalid share method: "{share_method}"; is_copy_tensor=False takes share_method='
                '"cpu" or "cuda"'
            )
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        if task_timeout is not None and task_timeout <= 0:
            raise ValueError(f"task_timeout must be more than 0 s, got {task_timeout}")
        self._start_method = start_method or "spawn"
        self._options: dict[str, Any] = {
            "is_daemon": is_daemon,
            "copy_tensor": is_copy_tensor,
            "recurse": is_recursive,
            "retries": retries,
            "task_timeout": task_timeout,
            "start_patience_s": self.start_patience_s,
        }
        context = multiprocessing.get_context(self._start_method)
        super().__init__(processes, initializer, initargs, maxtasksperchild, context)

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the dispatcher, which is both queues."""
        plan = Plan(
            self._ctx,
            self._start_method,
            self._initializers(),
            work=self.worker,
            maxtasks=self._maxtasksperchild,
            **self._options,
        )
        self._dispatcher = Dispatcher(plan, self._backlog(), self._cache, self._open_jobs)
        return self._dispatcher, self._dispatcher

    def repopulate_pool(self) -> None:
        """Start the workers that are missing; to be called in the pool's thread."""
        self._dispatcher.repopulate()

    def maintain_pool(self) -> None:
        """Replace workers that have ended; to be called in the pool's thread."""
        self.repopulate_pool()

    def terminate_workers(self) -> None:
        """Make the workers end now: SIGTERM, and SIGKILL a second later."""
        self._dispatcher.terminate()

    def join_workers(self) -> None:
        """Wait until the workers have ended; to be called in the pool's thread."""
        self._dispatcher.join()

    def size(self) -> int:
        """Return how many workers there are."""
        return self._dispatcher.size()

    def _initializers(self) -> list[tuple[Callable[..., object] | None, Sequence[Any]]]:
        return [(self._initializer, self._initargs)] * self._processes

    def _backlog(self) -> SharedBacklog | PerWorkerBacklog:
        return SharedBacklog()

    def _job_over(self, job: int) -> None:
        self._dispatcher.forget(job)

    def _waker(self) -> Callable[[], None]:
        return self._dispatcher.wake

    def _ender(self) -> Callable[[], None]:
        dispatcher = self._dispatcher

        def end() -> None:
            dispatcher.terminate()
            dispatcher.join()

        return end


class P2PPool(Pool):
    """A pool whose tasks are assigned to workers when they are submitted; each has its own queue.

    Arguments and behaviour are those of `Pool`; a worker whose queue is empty takes from others.
    """

    def _backlog(self) -> PerWorkerBacklog:
        return PerWorkerBacklog(self._processes)


class CtxPool(Pool):
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

    def _initializers(self) -> list[tuple[Callable[..., object] | None, Sequence[Any]]]:
        contexts = contexts_of(self._contexts, self._processes)
        return [
            (enter, (CtxPoolStorage, one, self._initializer, self._initargs)) for one in contexts
        ]

    def _prepared(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return WithContext(func)


def contexts_of(contexts: Sequence[Any] | None, workers: int) -> list[Any]:
    """Return a context for each worker.

    Raises:
        ValueError: they are not as many.
    """
    if contexts is None:
        return [None] * workers
    if len(contexts) != workers:
        raise ValueError(
            "Context number is not equal to the number of pool workers. There are "
            f"{len(contexts)} contexts, {workers} workers"
        )
    return list(contexts)
