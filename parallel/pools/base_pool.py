"""The base of all pools: their calls, and the methods that subclasses may override."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from multiprocessing.context import BaseContext
from typing import Any

from ..arguments import seconds, whole_number
from ..errors import TimeoutError
from ..processes import default_context
from .dispatcher import Dispatcher, Monitor, PoolStates, require_process
from .results import AsyncResult, Call, Callback, IMapIterator, IMapUnorderedIterator, MapResult
from .worker import map_caller, starmap_caller
from .worker import worker as run_tasks
from .workers import Options

__all__ = ["BasePool"]

Function = Callable[..., Any]
Items = Iterable[Any]


class BasePool:
    """A pool of processes; the base of all pools.

    Subclasses may override ``setup_queues``, ``pool_inqueue_put``, ``pool_outqueue_get``,
    ``repopulate_pool``, ``maintain_pool``, ``terminate_workers``, ``join_workers`` and the static
    ``worker``. The methods that manage workers are called in the pool's thread.

    A task is a tuple (job, chunk, function, arguments, keyword arguments). Its result is (job,
    chunk, (True, value)) or (job, chunk, (False, error)). ``job`` is the number of the call, and
    ``chunk`` is the number of the task in this call.

    If a worker dies, only the task that it was running is lost. If a subclass overrides
    ``setup_queues``, the pool does not know which worker has which task, and a worker that dies
    breaks the pool.

    Args:
        processes: the number of workers (default: the number of cores).
        initializer: called first in each worker, with ``initargs``; its error breaks the pool.
        maxtasksperchild: the number of tasks after which a worker is replaced (default: never).
        context: a multiprocessing context (default: multiprocessing's default context, or "spawn"
            if the default is "fork").

    Raises:
        ValueError: a number is below 1.
        TypeError: the initializer is not callable, or a number is not a whole number.
        NotImplementedError: the system is not Linux (pools of processes only).
    """

    # The fields of `Options` that a subclass sets.
    _options: Mapping[str, Any] = {}
    # Whether the program waits for the workers when it ends.
    _joins_at_exit = True

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Items = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | None = None,
    ) -> None:
        count = (os.cpu_count() or 1) if processes is None else processes
        self._processes = whole_number("Number of processes", count)
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, got {initializer!r}")
        if maxtasksperchild is not None:
            maxtasksperchild = whole_number("maxtasksperchild", maxtasksperchild)
        self._initializer = initializer
        self._initargs = tuple(initargs)
        self._maxtasksperchild = maxtasksperchild
        self._ctx = default_context() if context is None else context
        self._jobs = itertools.count()
        self._cache: dict[int, Any] = {}
        # Iterators that still have input to read or tasks in flight, and their jobs.
        self._open_inputs: set[IMapIterator] = set()
        self._open_jobs: set[int] = set()
        self._engine = self._make_engine()
        self._inqueue, self._outqueue = self.setup_queues()
        if self._inqueue is not self._engine:
            self._engine.queues = self._inqueue, self._outqueue
        is_plain = type(self).pool_outqueue_get is BasePool.pool_outqueue_get
        self._monitor = Monitor(self, is_plain=is_plain)
        self._monitor.start()

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the queue of tasks and the queue of results, each with ``put`` and ``get``."""
        return self._engine, self._engine

    def pool_inqueue_put(self, obj: Any) -> None:
        """Send a task to the workers; to end them, the pool sends None once per worker."""
        self._inqueue.put(obj)

    def pool_outqueue_get(self, timeout: float | None) -> Any:
        """Return the next result.

        Raises:
            TimeoutError: no result arrives within ``timeout`` seconds, or the workers need
                maintenance.
        """
        return self._outqueue.get(timeout=timeout)

    def repopulate_pool(self) -> None:
        """Start the missing workers.

        Raises:
            BrokenPoolError: the workers fail to start.
        """
        self._engine.repopulate()

    def maintain_pool(self) -> None:
        """Replace workers that have ended."""
        self.repopulate_pool()

    def terminate_workers(self) -> None:
        """End the workers: SIGTERM, and SIGKILL a second later."""
        self._engine.terminate()

    def join_workers(self) -> None:
        """Wait until the workers have ended."""
        self._engine.join()

    worker = staticmethod(run_tasks)

    def apply(self, func: Function, args: Items = (), kwds: Mapping[str, Any] | None = None) -> Any:
        """Call a function in a worker; return its value or raise its error."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Function,
        args: Items = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> AsyncResult:
        """Call a function in a worker without waiting for its value.

        Args:
            callback: called with the value, in the pool's thread. It should return soon, because
                this thread also delivers the other results.
            error_callback: called with the error, if the task fails.

        Raises:
            ValueError: the pool is closed.
        """
        self._monitor.check()
        job = next(self._jobs)
        task = (job, 0, self._bind_context(func), tuple(args), dict(kwds or {}))
        call = Call(f"apply({_get_name(func)})", self)
        result = AsyncResult(job, self._cache, callback, error_callback, call)
        _submit(self, result, (task,))
        return result

    def map(
        self,
        func: Function,
        iterable: Items,
        chunksize: int | None = None,
        *,
        progress: bool = False,
    ) -> list[Any]:
        """Return the values of a function for all items, in the order of the items.

        Args:
            chunksize: items per task (default: about four tasks per worker).
            progress: show a progress bar.

        Raises:
            Exception: a task failed; if several did, the error that arrived first.
            ValueError: the pool is closed, or ``chunksize`` is below 1.
        """
        values: list[Any] = self.map_async(func, iterable, chunksize, progress=progress).get()
        return values

    def map_async(
        self,
        func: Function,
        iterable: Items,
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
        *,
        progress: bool = False,
    ) -> MapResult:
        """Call ``map`` without waiting; callbacks get the list of values, or the error."""
        callbacks = (callback, error_callback)
        return _submit_items(self, map_caller, func, iterable, chunksize, callbacks, progress)

    def starmap(
        self,
        func: Function,
        iterable: Iterable[Items],
        chunksize: int | None = None,
        *,
        progress: bool = False,
    ) -> list[Any]:
        """Call ``map`` with items that are tuples of the function's arguments."""
        values: list[Any] = self.starmap_async(func, iterable, chunksize, progress=progress).get()
        return values

    def starmap_async(
        self,
        func: Function,
        iterable: Iterable[Items],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
        *,
        progress: bool = False,
    ) -> MapResult:
        """Call ``starmap`` without waiting; see ``map_async``."""
        callbacks = (callback, error_callback)
        return _submit_items(self, starmap_caller, func, iterable, chunksize, callbacks, progress)

    def imap(
        self,
        func: Function,
        iterable: Items,
        chunksize: int = 1,
        *,
        lookahead: int | None = None,
        progress: bool = False,
    ) -> IMapIterator:
        """Return an iterator over the values of a function, in the order of the items.

        If the input is a list or another sequence, this method reads its first items and starts
        their tasks. Other inputs may block, so they are first read when a value is taken. The
        thread that takes values reads further input each time; ``join`` reads the rest.

        Args:
            chunksize: items per task.
            lookahead: items to read in advance, rounded up to whole chunks (default: for each
                worker, 32 items or two chunks, whichever is more).
            progress: show a progress bar.

        Raises:
            ValueError: the pool is closed, or ``chunksize`` or ``lookahead`` is below 1.
        """
        return _submit_lazily(self, IMapIterator, func, iterable, chunksize, lookahead, progress)

    def imap_unordered(
        self,
        func: Function,
        iterable: Items,
        chunksize: int = 1,
        *,
        lookahead: int | None = None,
        progress: bool = False,
    ) -> IMapIterator:
        """Call ``imap``, but return values in the order in which they are ready."""
        kind = IMapUnorderedIterator
        return _submit_lazily(self, kind, func, iterable, chunksize, lookahead, progress)

    def close(self) -> None:
        """Accept no more calls; the workers end when the accepted ones are finished."""
        if self._monitor.phase is PoolStates.RUN:
            self._monitor.phase = PoolStates.CLOSE
            self._monitor.wake()

    def terminate(self) -> None:
        """End the workers; unfinished calls fail with ``PoolTerminatedError``."""
        if self._monitor.process == os.getpid():
            self._monitor.stop()
            self._monitor.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the workers have ended, after ``close`` or ``terminate``.

        After ``close``, read the rest of the input of all iterators. Each of them has at most
        ``lookahead`` items in flight, rounded up to whole chunks.

        Raises:
            ValueError: the pool still accepts calls.
            RuntimeError: the caller is a callback, or a process forked from the pool's.
            TimeoutError: the workers have not ended within ``timeout`` seconds. The error may come
                later, because reading an item of the input is not interrupted.
        """
        require_process(self._monitor.process)
        if self._monitor.phase is PoolStates.RUN:
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        # A callback delays all results, so `read_all` could wait for them forever.
        if self._monitor.is_current:
            raise RuntimeError("a callback cannot join its pool: it runs in the pool's thread")
        timeout = seconds("timeout", timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for iterator in list(self._open_inputs):
            iterator.read_all(deadline)
        if not self._monitor.join(None if timeout is None else deadline - time.monotonic()):
            raise TimeoutError(f"the pool's workers have not ended within {timeout} s")

    def size(self) -> int:
        """Return the number of running workers."""
        return int(self._engine.size())

    def __enter__(self) -> Any:
        self._monitor.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def __reduce__(self) -> Any:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def _make_engine(self) -> Any:
        """Return a ``Dispatcher``, or an object with the same methods."""
        options = Options(
            self._ctx, self._initializers(), self.worker, self._maxtasksperchild, **self._options
        )
        return Dispatcher(options, self._cache, self._open_jobs)

    def _initializers(self) -> list[tuple[Callable[..., object] | None, Sequence[Any]]]:
        """Return the initializer and its arguments for each worker."""
        return [(self._initializer, self._initargs)] * self._processes

    def _bind_context(self, func: Function) -> Function:
        """Return the function that workers call instead of ``func``."""
        return func


# The default number of items that an iterator reads in advance, per worker.
_LOOKAHEAD = 32


def _submit_items(
    pool: BasePool,
    caller: Function,
    func: Function,
    iterable: Items,
    chunksize: int | None,
    callbacks: tuple[Callback, Callback],
    progress: bool,
) -> MapResult:
    """Submit the items in chunks, each as one task that ``caller`` runs."""
    pool._monitor.check()
    if chunksize is not None:
        chunksize = whole_number("chunksize", chunksize)
    inputs: Sequence[Any] = iterable if isinstance(iterable, list) else list(iterable)
    if chunksize is None:
        chunksize = max(1, -(-len(inputs) // (4 * pool._processes)))
    name = f"{caller.__name__.removesuffix('_caller')}({_get_name(func)})"
    job = next(pool._jobs)
    bound = pool._bind_context(func)
    call = Call(name, pool, len(inputs), chunksize=chunksize, progress=progress)
    result = MapResult(job, pool._cache, len(inputs), *callbacks, call)
    tasks: Iterator[tuple[Any, ...]] = (
        (job, chunk, caller, ((bound, inputs[begin : begin + chunksize]),), {})
        for chunk, begin in enumerate(range(0, len(inputs), chunksize))
    )
    _submit(pool, result, tasks)
    return result


def _submit_lazily(
    pool: BasePool,
    kind: type[IMapIterator],
    func: Function,
    iterable: Items,
    chunksize: int,
    lookahead: int | None,
    progress: bool,
) -> IMapIterator:
    """Return an iterator that submits each chunk as one task when it reads the chunk."""
    pool._monitor.check()
    chunksize = whole_number("chunksize", chunksize)
    ahead = _chunks_ahead(lookahead, chunksize, pool._processes)
    total = len(iterable) if isinstance(iterable, Sized) else None
    job = next(pool._jobs)
    bound = pool._bind_context(func)

    def submit(chunk: int, inputs: list[Any]) -> None:
        _put(pool, iterator, (job, chunk, map_caller, ((bound, inputs),), {}))

    def end() -> None:
        pool._open_inputs.discard(iterator)
        pool._open_jobs.discard(job)
        # A closed pool ends when no input is open.
        if pool._monitor.phase is not PoolStates.RUN:
            pool._monitor.wake()

    method = "imap_unordered" if kind is IMapUnorderedIterator else "imap"
    name = f"{method}({_get_name(func)})"
    call = Call(name, pool, total, chunksize=chunksize, progress=progress)
    iterator = kind(job, pool._cache, iterable, submit, end, ahead=ahead, call=call)
    pool._open_inputs.add(iterator)
    pool._open_jobs.add(job)
    # Reading from an input that is not a sequence may block.
    if isinstance(iterable, Sequence):
        iterator.feed(deadline=0.0)
    return iterator


def _chunks_ahead(lookahead: int | None, chunksize: int, workers: int) -> int:
    """Return the maximum number of chunks that are read before their values are taken."""
    if lookahead is None:
        # At least two chunks per worker, however large they are.
        return max(-(-_LOOKAHEAD * workers // chunksize), 2 * workers)
    return -(-whole_number("lookahead", lookahead) // chunksize)


def _submit(pool: BasePool, call: AsyncResult, tasks: Iterable[tuple[Any, ...]]) -> None:
    try:
        for task in tasks:
            _put(pool, call, task)
    except BaseException as error:
        call.withdraw(error)
        raise


def _put(pool: BasePool, call: Any, task: tuple[Any, ...]) -> None:
    try:
        pool.pool_inqueue_put(task)
    except Exception as error:
        call.set(task[1], (False, error))
    # The pool may have ended since the call was accepted.
    if pool._monitor.is_ended:
        call.fail(pool._monitor.end_error())


def _get_name(func: object) -> str:
    inner = getattr(func, "func", func)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__
