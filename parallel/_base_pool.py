"""The base of all pools: their calls, and what subclasses may override."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from . import _queue_worker
from . import _submission as submit
from ._keeper import Keeper, PoolStates
from ._worker import map_caller, starmap_caller
from ._worker import worker as run_tasks
from .errors import BrokenPoolError, TimeoutError
from .processes import Process, default_context
from .results import AsyncResult, Callback, IMapIterator, IMapUnorderedIterator, MapResult


class BasePool:
    """A pool of workers between two queues; the base of all pools.

    Subclasses may override `setup_queues`, `pool_inqueue_put`, `pool_outqueue_get`,
    `repopulate_pool`, `maintain_pool`, `terminate_workers`, `join_workers` and the static `worker`.
    A task is (job, chunk, function, arguments, keyword arguments), a result (job, chunk, (True,
    value) or (False, error)). Which worker has which task is not known here: a worker that dies
    breaks the pool. `Pool` loses one task at most.

    Args:
        processes: workers (default: as many as the machine has cores).
        initializer: called in each worker first, with `initargs`.
        maxtasksperchild: tasks after which a worker is replaced; None: never.
        context: of multiprocessing (default: its default one, or "spawn" in place of "fork").

    Raises:
        ValueError: a number is below 1.
        TypeError: the initializer is not callable, or `processes` is no whole number.
    """

    # Whether `get` of the queue of results returns when it is woken, and needs no time-out.
    _is_woken = False
    # Whether the end of the program waits for the workers.
    _is_waited = True

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | None = None,
    ) -> None:
        self._processes = (os.cpu_count() or 1) if processes is None else processes
        if not hasattr(self._processes, "__index__"):
            raise TypeError(f"processes must be a whole number or None, got {processes!r}")
        if self._processes < 1:
            raise ValueError(f"Number of processes must be at least 1, got {processes}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, got {initializer!r}")
        if maxtasksperchild is not None and maxtasksperchild < 1:
            raise ValueError(f"maxtasksperchild must be at least 1 or None, got {maxtasksperchild}")
        self._initializer = initializer
        self._initargs = tuple(initargs)
        self._maxtasksperchild = maxtasksperchild
        self._ctx = default_context() if context is None else context
        self._jobs = itertools.count()
        self._cache: dict[int, Any] = {}
        # Iterators whose input is not read to its end, and their numbers.
        self._open_inputs: set[IMapIterator] = set()
        self._open_jobs: set[int] = set()
        self._workers: list[Any] = []
        self._inqueue, self._outqueue = self.setup_queues()
        is_plain = type(self).pool_outqueue_get is BasePool.pool_outqueue_get
        self._keeper = Keeper(
            self,
            get=self._outqueue.get if is_plain else _weakly(self, "pool_outqueue_get"),
            wake=self._waker(),
            end_workers=self._ender(),
            is_woken=is_plain and self._is_woken,
            is_waited=self._is_waited,
        )
        self._keeper.start()

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the queue of tasks and the queue of results, each with `put` and `get`."""
        from .transport.queues import SimpleQueue

        return SimpleQueue(ctx=self._ctx), SimpleQueue(ctx=self._ctx)

    def pool_inqueue_put(self, obj: Any) -> None:
        """Hand a task to the workers; None ends one of them."""
        self._inqueue.put(obj)

    def pool_outqueue_get(self, timeout: float | None) -> Any:
        """Return the next result.

        Raises:
            TimeoutError: there is none within `timeout` seconds.
        """
        return self._outqueue.get(timeout=timeout)

    def repopulate_pool(self) -> None:
        """Start the workers that are missing."""
        while len(self._workers) < self._processes:
            process = Process(
                target=_queue_worker.main,
                args=(
                    self.worker,
                    self._inqueue,
                    self._outqueue,
                    self._initializer,
                    self._initargs,
                    self._maxtasksperchild,
                ),
                ctx=self._ctx,
                daemon=True,
            )
            process.start()
            self._workers.append(process)

    def maintain_pool(self) -> None:
        """Replace workers that have ended.

        Raises:
            BrokenPoolError: one has failed.
        """
        for process in [one for one in self._workers if one.exitcode is not None]:
            failure = process.exception
            if failure is not None:
                raise BrokenPoolError(f"the pool is broken: {failure}") from failure
            process.join()
            self._workers.remove(process)
        self.repopulate_pool()

    def terminate_workers(self) -> None:
        """Make the workers end now."""
        _queue_worker.terminate(self._workers)

    def join_workers(self) -> None:
        """Wait until the workers have ended."""
        for process in self._workers:
            process.join()

    worker = staticmethod(run_tasks)

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function in a worker; return its value or raise its error."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> AsyncResult:
        """Run a function in a worker, and return at once.

        Args:
            callback: called with the value, in the pool's thread: it should be brief.
            error_callback: called with the error instead.

        Raises:
            ValueError: the pool is closed.
        """
        return submit.once(self, func, args, kwds, (callback, error_callback))

    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        *,
        progress: bool = False,
    ) -> list[Any]:
        """Return the values of a function for all items, in their order.

        Args:
            chunksize: items per task (default: about four tasks per worker).
            progress: show a bar.
        """
        return self.map_async(func, iterable, chunksize, progress=progress).values()

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
        *,
        progress: bool = False,
    ) -> MapResult:
        """As `map`, but return at once; a callback takes the whole list."""
        calls = (callback, error_callback)
        return submit.over_items(self, map_caller, func, iterable, chunksize, calls, progress)

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        progress: bool = False,
    ) -> list[Any]:
        """As `map`, each item being the arguments of a call."""
        return self.starmap_async(func, iterable, chunksize, progress=progress).values()

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
        *,
        progress: bool = False,
    ) -> MapResult:
        """As `starmap`, but return at once; a callback takes the whole list."""
        calls = (callback, error_callback)
        return submit.over_items(self, starmap_caller, func, iterable, chunksize, calls, progress)

    def imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int = 1,
        *,
        lookahead: int | None = None,
        progress: bool = False,
    ) -> IMapIterator:
        """Return an iterator over the values of a function for all items, in their order.

        The input is read as values are taken, in the thread that takes them; `join` reads the rest.

        Args:
            chunksize: items per task.
            lookahead: items read ahead (default: 32 per worker).
            progress: show a bar.
        """
        return submit.lazily(self, IMapIterator, func, iterable, chunksize, lookahead, progress)

    def imap_unordered(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int = 1,
        *,
        lookahead: int | None = None,
        progress: bool = False,
    ) -> IMapIterator:
        """As `imap`, but values come as they are ready."""
        kind = IMapUnorderedIterator
        return submit.lazily(self, kind, func, iterable, chunksize, lookahead, progress)

    def close(self) -> None:
        """Take no more calls; the workers end when all that was taken is done."""
        if self._keeper.phase is PoolStates.RUN:
            self._keeper.phase = PoolStates.CLOSE
            self._keeper.wake()

    def terminate(self) -> None:
        """End the workers now; results that are not there fail with `PoolTerminatedError`."""
        self._keeper.stop()
        self._keeper.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the workers have ended, after `close` or `terminate`.

        Raises:
            ValueError: the pool still takes calls.
            TimeoutError: they have not ended within `timeout` seconds.
        """
        if self._keeper.phase is PoolStates.RUN:
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        for iterator in list(self._open_inputs):
            iterator.read_all()
        self._keeper.wake()
        if not self._keeper.join(timeout):
            raise TimeoutError(f"the pool's workers have not ended within {timeout} s")

    def size(self) -> int:
        """Return how many workers are alive."""
        return sum(worker.is_alive() for worker in self._workers)

    def __enter__(self) -> Any:
        self._keeper.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def __reduce__(self) -> Any:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def _prepared(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return what workers are to call for a function."""
        return func

    def _job_over(self, job: int) -> None:
        """Take note that a call has ended other than by its last result."""

    def _waker(self) -> Callable[[], None]:
        return _nothing

    def _ender(self) -> Callable[[], None]:
        workers = self._workers
        return lambda: _queue_worker.terminate(workers)


def _weakly(pool: BasePool, method: str) -> Callable[..., Any]:
    """Return a method that does not keep the pool."""
    ref = weakref.ref(pool)

    def call(timeout: float | None) -> Any:
        pool = ref()
        if pool is None:
            raise TimeoutError("the pool is gone")
        return getattr(pool, method)(timeout)

    return call


def _nothing() -> None:
    """Where there is nothing to wake: the thread looks by itself now and then."""
