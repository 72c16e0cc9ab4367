"""The base of all pools: their calls, and what subclasses may override."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from multiprocessing.context import BaseContext
from typing import Any

from ..errors import BrokenPoolError, EncodingError, TimeoutError
from ..processes import Process
from ..start_methods import default_context
from ..transport.remote_errors import ExceptionWithTraceback
from .monitor import Monitor, PoolStates
from .results import (
    AsyncResult,
    Bar,
    Callback,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
    chunks_of,
)
from .worker import map_caller, starmap_caller
from .worker import worker as run_tasks


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
        self._monitor = Monitor(
            self,
            get=self._outqueue.get if is_plain else _weakly(self, "pool_outqueue_get"),
            wake=self._waker(),
            end_workers=self._ender(),
            is_woken=is_plain and self._is_woken,
            is_waited=self._is_waited,
        )
        self._monitor.start()

    def setup_queues(self) -> tuple[Any, Any]:
        """Return the queue of tasks and the queue of results, each with `put` and `get`."""
        from ..transport.queues import SimpleQueue

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
                target=run_queue_worker,
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
        terminate_processes(self._workers)

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
        return submit_call(self, func, args, kwds, (callback, error_callback))

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
        return submit_items(self, map_caller, func, iterable, chunksize, calls, progress)

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
        return submit_items(self, starmap_caller, func, iterable, chunksize, calls, progress)

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
        return submit_lazily(self, IMapIterator, func, iterable, chunksize, lookahead, progress)

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
        return submit_lazily(self, kind, func, iterable, chunksize, lookahead, progress)

    def close(self) -> None:
        """Take no more calls; the workers end when all that was taken is done."""
        if self._monitor.phase is PoolStates.RUN:
            self._monitor.phase = PoolStates.CLOSE
            self._monitor.wake()

    def terminate(self) -> None:
        """End the workers now; results that are not there fail with `PoolTerminatedError`."""
        self._monitor.stop()
        self._monitor.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the workers have ended, after `close` or `terminate`.

        Raises:
            ValueError: the pool still takes calls.
            TimeoutError: they have not ended within `timeout` seconds.
        """
        if self._monitor.phase is PoolStates.RUN:
            raise ValueError("Pool is still running: call close() or terminate() before join()")
        for iterator in list(self._open_inputs):
            iterator.read_all()
        self._monitor.wake()
        if not self._monitor.join(timeout):
            raise TimeoutError(f"the pool's workers have not ended within {timeout} s")

    def size(self) -> int:
        """Return how many workers are alive."""
        return sum(worker.is_alive() for worker in self._workers)

    def __enter__(self) -> Any:
        self._monitor.check()
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
        # Nothing to wake: the thread looks by itself now and then.
        return lambda: None

    def _ender(self) -> Callable[[], None]:
        workers = self._workers
        return lambda: terminate_processes(workers)


def _weakly(pool: BasePool, method: str) -> Callable[..., Any]:
    """Return a method that does not keep the pool."""
    ref = weakref.ref(pool)

    def call(timeout: float | None) -> Any:
        pool = ref()
        if pool is None:
            raise TimeoutError("the pool is gone")
        return getattr(pool, method)(timeout)

    return call


# Items that an iterator reads ahead, per worker.
_LOOKAHEAD = 32


def submit_call(
    pool: BasePool,
    func: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None,
    callbacks: tuple[Callback, Callback],
) -> AsyncResult:
    """Submit one call of a function."""
    pool._monitor.check()
    call = pool._prepared(func), tuple(args), dict(kwargs or {})
    job = next(pool._jobs)
    name = f"apply({_name_of(func)})"
    handing_over = threading.Lock()
    try:
        with handing_over:
            result = AsyncResult(
                job, pool._cache, *callbacks, name=name, keep=pool, submission=handing_over
            )
            _put(pool, result, (job, 0, *call))
            result.is_whole = True
    except BaseException:
        _withdraw(pool, job)
        raise
    _fail_if_ended(pool, result)
    return result


def submit_items(
    pool: BasePool,
    caller: Callable[..., Any],
    func: Callable[..., Any],
    iterable: Iterable[Any],
    chunksize: int | None,
    callbacks: tuple[Callback, Callback],
    progress: bool,
) -> MapResult:
    """Submit a call for each item, in chunks that `caller` runs."""
    pool._monitor.check()
    items: Sequence[Any] = iterable if isinstance(iterable, list) else list(iterable)
    if chunksize is None:
        chunksize = max(1, -(-len(items) // (4 * pool._processes)))
    _check_chunksize(chunksize)
    name = f"{caller.__name__.removesuffix('_caller')}({_name_of(func)})"
    bar = Bar(name, len(items)) if progress else None
    job = next(pool._jobs)
    sizes = (chunksize, len(items))
    prepared = pool._prepared(func)
    handing_over = threading.Lock()
    more: dict[str, Any] = {"name": name, "keep": pool, "bar": bar, "submission": handing_over}
    try:
        with handing_over:
            result = MapResult(job, pool._cache, *sizes, *callbacks, **more)
            for chunk, begin in enumerate(range(0, len(items), chunksize)):
                part = items[begin : begin + chunksize]
                _put(pool, result, (job, chunk, caller, ((prepared, part),), {}))
            result.is_whole = True
    except BaseException:
        _withdraw(pool, job, bar)
        raise
    _fail_if_ended(pool, result)
    return result


def submit_lazily(
    pool: BasePool,
    kind: type[IMapIterator],
    func: Callable[[Any], Any],
    iterable: Iterable[Any],
    chunksize: int,
    lookahead: int | None,
    progress: bool,
) -> IMapIterator:
    """Return an iterator that submits a call for each item when it reads the item."""
    pool._monitor.check()
    _check_chunksize(chunksize)
    ahead = _ahead(lookahead, chunksize, pool._processes)
    name = f"imap({_name_of(func)})"
    total = len(iterable) if progress and isinstance(iterable, Sized) else None
    job = next(pool._jobs)
    prepared = pool._prepared(func)

    def submit(chunk: int, items: list[Any]) -> None:
        _put(pool, iterator, (job, chunk, map_caller, ((prepared, items),), {}))
        _fail_if_ended(pool, iterator)

    def end_input(iterator: IMapIterator) -> None:
        pool._open_inputs.discard(iterator)
        pool._open_jobs.discard(job)
        if job not in pool._cache:
            pool._job_over(job)

    pool._open_jobs.add(job)
    iterator = kind(
        job,
        pool._cache,
        chunks_of(iterable, chunksize),
        submit,
        shape=(ahead, chunksize),
        name=name,
        on_end=end_input,
        bar=Bar(name, total) if progress else None,
    )
    pool._open_inputs.add(iterator)
    try:
        iterator.feed()
    except BaseException as error:
        iterator.fail(error)
        raise
    return iterator


def _ahead(lookahead: int | None, chunksize: int, workers: int) -> int:
    """Return how many chunks of an input may be out or not yet taken."""
    if lookahead is None:
        # Of large chunks still one for each worker, and one to follow.
        return max(-(-_LOOKAHEAD * workers // chunksize), 2 * workers)
    if lookahead < 1:
        raise ValueError(f"lookahead must be at least 1, got {lookahead}")
    return -(-lookahead // chunksize)


def _put(pool: BasePool, call: Any, task: tuple[Any, ...]) -> None:
    try:
        pool.pool_inqueue_put(task)
    except Exception as error:
        call.set(task[1], (False, error))


def _withdraw(pool: BasePool, job: int, bar: Bar | None = None) -> None:
    """Forget a call that could not be submitted whole (Ctrl-C): nobody has its result.

    Where this is interrupted as well, `join` does it.
    """
    pool._cache.pop(job, None)
    pool._job_over(job)
    if bar is not None:
        bar.stop()


def _fail_if_ended(pool: BasePool, call: Any) -> None:
    # The pool may have ended since the call was let in.
    if pool._monitor.is_ended:
        call.fail(pool._monitor.end_error())


def _check_chunksize(chunksize: int) -> None:
    if chunksize < 1:
        raise ValueError(f"chunksize must be at least 1, got {chunksize}")


def _name_of(func: object) -> str:
    inner = getattr(func, "func", func)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__


_GRACE_S = 1.0


def run_queue_worker(
    work: Callable[..., None],
    inqueue: Any,
    outqueue: Any,
    initializer: Callable[..., object] | None,
    initargs: Sequence[Any],
    maxtasks: int | None,
) -> None:
    """Run a worker's process: `work` between the queues."""

    def put(result: tuple[int, int, tuple[bool, Any]]) -> None:
        job, chunk, (success, value) = result
        if not success:
            value = ExceptionWithTraceback(value)
        try:
            outqueue.put((job, chunk, (success, value)))
        except Exception as error:
            unsent = EncodingError(f"{type(error).__name__}: {error}", repr(value))
            outqueue.put((job, chunk, (False, unsent)))

    work(inqueue.get, put, initializer, initargs, maxtasks)


def terminate_processes(processes: Sequence[Any]) -> None:
    """End processes: SIGTERM, and SIGKILL to those that stay."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
