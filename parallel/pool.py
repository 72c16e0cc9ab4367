"""Pools of processes: multiprocessing's calls, and every task ends in a value or an error."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from multiprocessing.context import BaseContext
from typing import Any

from . import _queue_worker
from ._backlog import DealtBacklog, SharedBacklog
from ._keeper import Keeper, PoolStates
from ._progress import Bar
from ._starts import Plan
from ._worker import map_caller, starmap_caller
from ._worker import worker as run_tasks
from .dispatcher import Dispatcher
from .errors import BrokenPoolError, TimeoutError
from .results import (
    AsyncResult,
    Callback,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
    chunks_of,
)

__all__ = ["BasePool", "P2PPool", "Pool", "PoolStates"]
_LOOKAHEAD = 32


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
        context: of multiprocessing; None is the platform's default.

    Raises:
        ValueError: a number is below 1.
        TypeError: the initializer is not callable.
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
        if self._processes < 1:
            raise ValueError(f"Number of processes must be at least 1, got {processes}")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be a callable, got {initializer!r}")
        if maxtasksperchild is not None and maxtasksperchild < 1:
            raise ValueError(f"maxtasksperchild must be at least 1 or None, got {maxtasksperchild}")
        self._initializer = initializer
        self._initargs = tuple(initargs)
        self._maxtasksperchild = maxtasksperchild
        self._ctx = multiprocessing.get_context() if context is None else context
        self._jobs = itertools.count()
        self._cache: dict[int, Any] = {}
        # Of iterators whose input is not read to its end.
        self._open_inputs: set[IMapIterator] = set()
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
        from .queues import SimpleQueue

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
            process = self._ctx.Process(  # type: ignore[attr-defined]
                target=_queue_worker.main,
                args=(
                    self.worker,
                    self._inqueue,
                    self._outqueue,
                    self._initializer,
                    self._initargs,
                    self._maxtasksperchild,
                ),
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
            if process.exitcode:
                raise BrokenPoolError(_queue_worker.death_text(process.pid, process.exitcode))
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
        self._keeper.check()
        name = f"apply({_name_of(func)})"
        job = next(self._jobs)
        result = AsyncResult(job, self._cache, callback, error_callback, name=name, keep=self)
        self._put(result, (job, 0, self._prepared(func), tuple(args), dict(kwds or {})))
        self._fail_if_ended(result)
        return result

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
        values: list[Any] = self._map(
            map_caller, func, iterable, chunksize, progress=progress
        ).get()
        return values

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
        return self._map(map_caller, func, iterable, chunksize, calls=calls, progress=progress)

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        progress: bool = False,
    ) -> list[Any]:
        """As `map`, each item being the arguments of a call."""
        values: list[Any] = self._map(
            starmap_caller, func, iterable, chunksize, progress=progress
        ).get()
        return values

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
        return self._map(starmap_caller, func, iterable, chunksize, calls=calls, progress=progress)

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
        return self._imap(IMapIterator, func, iterable, chunksize, lookahead, progress=progress)

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
        return self._imap(kind, func, iterable, chunksize, lookahead, progress=progress)

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
            iterator.feed(float("inf"))
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

    def _waker(self) -> Callable[[], None]:
        return _nothing

    def _ender(self) -> Callable[[], None]:
        workers = self._workers
        return lambda: _queue_worker.terminate(workers)

    def _map(
        self,
        caller: Callable[..., Any],
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        *,
        calls: tuple[Callback, Callback] = (None, None),
        progress: bool = False,
    ) -> MapResult:
        self._keeper.check()
        items: Sequence[Any] = iterable if isinstance(iterable, list) else list(iterable)
        if chunksize is None:
            chunksize = max(1, -(-len(items) // (4 * self._processes)))
        _check_chunksize(chunksize)
        name = f"{caller.__name__.removesuffix('_caller')}({_name_of(func)})"
        bar = Bar(name, len(items)) if progress else None
        job = next(self._jobs)
        result = MapResult(
            job, self._cache, chunksize, len(items), *calls, name=name, keep=self, bar=bar
        )
        prepared = self._prepared(func)
        for chunk, begin in enumerate(range(0, len(items), chunksize)):
            part = items[begin : begin + chunksize]
            self._put(result, (job, chunk, caller, ((prepared, part),), {}))
        self._fail_if_ended(result)
        return result

    def _imap(
        self,
        kind: type[IMapIterator],
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int,
        lookahead: int | None,
        *,
        progress: bool,
    ) -> IMapIterator:
        self._keeper.check()
        _check_chunksize(chunksize)
        ahead = self._ahead(lookahead, chunksize)
        name = f"imap({_name_of(func)})"
        total = len(iterable) if progress and isinstance(iterable, Sized) else None
        job = next(self._jobs)
        prepared = self._prepared(func)

        def submit(chunk: int, items: list[Any]) -> None:
            self._put(iterator, (job, chunk, map_caller, ((prepared, items),), {}))
            self._fail_if_ended(iterator)

        iterator = kind(
            job,
            self._cache,
            chunks_of(iterable, chunksize),
            submit,
            shape=(ahead, chunksize),
            name=name,
            on_end=self._open_inputs.discard,
            bar=Bar(name, total) if progress else None,
        )
        self._open_inputs.add(iterator)
        iterator.feed(ahead)
        return iterator

    def _ahead(self, lookahead: int | None, chunksize: int) -> int:
        """Return how many chunks of an input may be out or not yet taken."""
        if lookahead is None:
            # Of large chunks still one for each worker, and one to follow.
            return max(-(-_LOOKAHEAD * self._processes // chunksize), 2 * self._processes)
        if lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, got {lookahead}")
        return -(-lookahead // chunksize)

    def _put(self, call: Any, task: tuple[Any, ...]) -> None:
        try:
            self.pool_inqueue_put(task)
        except Exception as error:
            call.set(task[1], (False, error))

    def _fail_if_ended(self, call: Any) -> None:
        # The pool may have ended between the check and now.
        if self._keeper.is_ended:
            call.fail(self._keeper.end_error())


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
        share_method: "cpu" or "cuda", where tensors are not copied; "cpu" forks the workers.
        retries: how often a task is run again whose worker has died.
        task_timeout: seconds that a task may run; then its worker is killed and replaced.
        start_method: "spawn", "fork" or "forkserver" (default: "spawn", unless said otherwise).

    Raises:
        RuntimeError: tensors are not copied and `share_method` is neither of the two.
        BrokenPoolError: (by calls) the initializer fails, or workers die before they are ready.
        WorkerDiedError: (by results) the task's worker died, or took too long (`TaskTimeoutError`).
    """

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
        if start_method is None:
            shares = not is_copy_tensor and share_method == "cpu"
            start_method = "fork" if shares else "spawn"
        self._start_method = start_method
        self._options: dict[str, Any] = {
            "is_daemon": is_daemon,
            "copy_tensor": is_copy_tensor,
            "recurse": is_recursive,
            "retries": retries,
            "task_timeout": task_timeout,
        }
        context = multiprocessing.get_context(start_method)
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
        self._dispatcher = Dispatcher(plan, self._backlog(), self._cache)
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

    def _backlog(self) -> SharedBacklog | DealtBacklog:
        return SharedBacklog()

    def _waker(self) -> Callable[[], None]:
        return self._dispatcher.wake

    def _ender(self) -> Callable[[], None]:
        dispatcher = self._dispatcher

        def end() -> None:
            dispatcher.terminate()
            dispatcher.join()

        return end


class P2PPool(Pool):
    """A pool whose tasks are dealt to workers when they come, each having a line of its own.

    Arguments and behaviour are those of `Pool`; a worker whose line is empty takes from others.
    """

    def _backlog(self) -> DealtBacklog:
        return DealtBacklog(self._processes)


def _check_chunksize(chunksize: int) -> None:
    if chunksize < 1:
        raise ValueError(f"chunksize must be at least 1, got {chunksize}")


def _name_of(func: object) -> str:
    inner = getattr(func, "func", func)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__


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
