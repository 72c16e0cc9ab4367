"""Pools of processes each of which has a context of its own: a device, a connection, a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._context import CtxPoolStorage, WithContext, enter, proxy_ctx_caller
from .pool import Pool

__all__ = ["CtxPool", "CtxPoolStorage", "contexts_of", "proxy_ctx_caller"]


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
        return [(enter, (one, self._initializer, self._initargs)) for one in contexts]

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
