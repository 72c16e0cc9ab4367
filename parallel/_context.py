"""The context of a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class CtxPoolStorage:
    """Holds the context of this worker process.

    Attributes:
        storage: the context; None in a process that is no worker of a `CtxPool`.
    """

    storage: Any = None


class WithContext:
    """A function that is called with the worker's context before its own arguments."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(CtxPoolStorage.storage, *args, **kwargs)


def proxy_ctx_caller(
    call: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run a function with this worker's context before its own arguments.

    Args:
        call: the function, or its `pickling.dumps`; alone, the triple of it, args and kwargs.
        args: its further arguments.
        kwargs: its keyword arguments.
    """
    if args is None:
        call, args, kwargs = call
    if isinstance(call, bytes):
        from .transport.pickling import loads

        call = loads(call)
    return call(CtxPoolStorage.storage, *(args or ()), **(kwargs or {}))


def enter(context: Any, initializer: Callable[..., object] | None, initargs: Sequence[Any]) -> None:
    """Begin as a worker with a context."""
    CtxPoolStorage.storage = context
    if initializer is not None:
        initializer(*initargs)
