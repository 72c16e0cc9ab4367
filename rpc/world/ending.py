"""How a process leaves its world: once, together with the others, within the time it is given."""

from __future__ import annotations

import contextlib
import threading
import time

from torch._C._distributed_c10d import Store

from ..errors import RpcError
from .members import linger
from .store import MeetingPlace, is_there, naming_rank_zero

# How long the end may take of a process that does not wait for the others.
_AT_ONCE_S = 1.0


class Ending:
    """Who ends a world, and by when."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[int, object]] = {}
        self._is_over = threading.Event()
        self._deadline = time.monotonic() + _AT_ONCE_S
        self._is_cancelled = False

    def cancel(self) -> None:
        """Have the world not begin."""
        self._is_cancelled = True

    def check_wanted(self, name: str) -> None:
        """Check that nobody has stopped the world while it was made.

        Raises:
            RuntimeError: somebody has.
        """
        if self._is_cancelled:
            raise RuntimeError(f"the world of {name!r} was stopped while it was made")

    def claim(self, timeout_s: float) -> bool:
        """Return whether the caller is the one to end the world; else wait until it has ended.

        There is no lock that a signal's handler could find held by the thread that it has
        interrupted; what this thread itself has begun, it does not wait for.
        """
        own = threading.get_ident(), object()
        first = self._claims.setdefault("first", own)
        if first is not own and first[0] != own[0]:
            self._is_over.wait(timeout_s)
        return first is own

    def begin(self, timeout_s: float | None) -> None:
        """Set the time for all that follows; None is for those who leave at once."""
        self._deadline = time.monotonic() + (_AT_ONCE_S if timeout_s is None else timeout_s)

    def left(self) -> float:
        """Return how much time there is, in seconds."""
        return max(0.0, self._deadline - time.monotonic())

    def finish(self) -> None:
        """Release those who wait for the end."""
        self._is_over.set()


def leave_together(place: MeetingPlace, rank: int, names: dict[int, str], timeout_s: float) -> None:
    """Wait until every member has come to the end of a world without calls.

    Raises:
        RpcError: members have not come in time; they are named.
    """
    store = place.store
    deadline = time.monotonic() + timeout_s
    with naming_rank_zero(place, "end of the world"):
        store.set(f"left_{rank}", "1")
        try:
            for one in names:
                if not is_there(store, f"left_{one}", deadline - time.monotonic()):
                    missing = [name for one, name in names.items() if not _has_left(store, one)]
                    verb = "has" if len(missing) == 1 else "have"
                    raise RpcError(
                        f"end of the world: {', '.join(map(repr, missing))} {verb} not come "
                        f"within {timeout_s:g} s"
                    )
        finally:
            if rank == 0:
                linger(store, sum(_has_left(store, one) for one in names))
            else:
                # Rank 0 may be gone already: what it had to say has been read.
                with contextlib.suppress(RuntimeError):
                    store.add("seen", 1)


def _has_left(store: Store, rank: int) -> bool:
    return store.check([f"left_{rank}"])
