"""How the calls of pools become tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from ._iterators import chunks_of
from ._progress import Bar
from ._worker import map_caller
from .results import AsyncResult, Callback, IMapIterator, MapResult

if TYPE_CHECKING:
    from ._base_pool import BasePool

# Items that an iterator reads ahead, per worker.
_LOOKAHEAD = 32


def once(
    pool: BasePool,
    func: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None,
    callbacks: tuple[Callback, Callback],
) -> AsyncResult:
    """Submit one call of a function."""
    pool._keeper.check()
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


def over_items(
    pool: BasePool,
    caller: Callable[..., Any],
    func: Callable[..., Any],
    iterable: Iterable[Any],
    chunksize: int | None,
    callbacks: tuple[Callback, Callback],
    progress: bool,
) -> MapResult:
    """Submit a call for each item, in chunks that `caller` runs."""
    pool._keeper.check()
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


def lazily(
    pool: BasePool,
    kind: type[IMapIterator],
    func: Callable[[Any], Any],
    iterable: Iterable[Any],
    chunksize: int,
    lookahead: int | None,
    progress: bool,
) -> IMapIterator:
    """Return an iterator that submits a call for each item when it reads the item."""
    pool._keeper.check()
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
    if pool._keeper.is_ended:
        call.fail(pool._keeper.end_error())


def _check_chunksize(chunksize: int) -> None:
    if chunksize < 1:
        raise ValueError(f"chunksize must be at least 1, got {chunksize}")


def _name_of(func: object) -> str:
    inner = getattr(func, "func", func)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__
