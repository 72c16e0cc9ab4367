"""Workers between two queues that they share: what `BasePool` starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import EncodingError
from .processes import ExceptionWithTraceback

_GRACE_S = 1.0


def main(
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


def terminate(processes: Sequence[Any]) -> None:
    """End processes: SIGTERM, and SIGKILL to those that stay."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
