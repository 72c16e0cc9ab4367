"""Run copies in threads for tests of their synchronisation; a hang fails the test."""

import threading
from collections.abc import Callable
from typing import Any

from stepwrap.wrappers import ReplicationSession

LIMIT_S = 20


def run_threads(works: list[Callable[[], Any]], limit_s: float = LIMIT_S) -> list[Any]:
    """Run functions at the same time; return each one's result or error."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    hanging = [index for index, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"threads {hanging} have not ended in {limit_s} s"
    return results


def run_in_thread(call: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return the result of a call or raise its error; a call that hangs fails the test."""
    (result,) = run_threads([call], limit_s)
    if isinstance(result, BaseException):
        raise result
    return result


def run_copies(
    session: ReplicationSession, forward: Callable[[ReplicationSession, int], Any]
) -> list[Any]:
    """Run ``forward(session, copy_id)`` for every copy and report its end to the session."""

    def copy(copy_id: int) -> Any:
        try:
            result = forward(session, copy_id)
        except BaseException as error:
            session.finish(copy_id, error)
            raise
        session.finish(copy_id)
        return result

    return run_threads([lambda i=i: copy(i) for i in range(session.num_copies)])
