"""Record and compare collectives while tracing, and report this rank's position to other ranks."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import Call, call_site, user_site
from ..process.ranks import distributed_available, process_space
from .headers import exchange_headers, raise_disagreement

# A rank asks the others for their positions through the store. They check for such a question every
# _POLL_S seconds, and the rank that asks waits ANSWER_S seconds for their answers.
_POLL_S = 0.5
ANSWER_S = 2.0
IN = "is in"
_JOIN_S = 2.0
_KEPT = 256
_WATCHED = "stepwrap/watched"
_OFF = ("", "0", "false", "no", "off")
_is_on = os.environ.get("STEPWRAP_COLLECTIVE_TRACE", "").lower() not in _OFF
_records: collections.deque[CollectiveRecord] = collections.deque(maxlen=_KEPT)
_numbers = itertools.count(1)
# A function that says what this rank is doing; set by `answering`.
_progress: Callable[[], str] | None = None


@dataclass
class CollectiveRecord:
    """One collective call of this rank.

    Attributes:
        number: 1 for the first call since tracing began.
        name: the function.
        site: "file:line" of the caller.
        structure: a description of the arguments, or the keys of a dict.
        state: "running", "finished" or "failed".
    """

    number: int
    name: str
    site: str
    structure: str | list[str]
    state: str = "running"

    def __str__(self) -> str:
        return f"#{self.number} {self.name} ({self.site})"


def trace_collectives(on: bool = True) -> None:
    """Switch the tracing of collectives on or off; every rank must do the same.

    While tracing, each collective is recorded. Before it runs, the ranks compare their calls and
    the structure of their arguments in one small extra exchange, unless the collective exchanges
    headers anyway. ``synchronize`` compares nothing. Errors report where missing ranks are. The
    environment variable STEPWRAP_COLLECTIVE_TRACE=1 switches tracing on from the start.
    """
    global _is_on
    _is_on = on
    if on and distributed_available():
        _Responder.start_once()


def is_tracing() -> bool:
    """Return whether collectives are traced."""
    return _is_on


@contextlib.contextmanager
def answering(progress: Callable[[], str]) -> Iterator[None]:
    """Run a thread in this context that reports this rank's position to other ranks that ask."""
    global _progress
    outer, _progress = _progress, progress
    _Responder.start_once()
    try:
        yield
    finally:
        _progress = outer
        if outer is None and not _is_on:
            _Responder.stop()


def is_in_progress() -> bool:
    return _progress is not None


def is_answering() -> bool:
    """Return whether this rank answers questions; it may only ask other ranks if it does."""
    return _Responder.running is not None and _Responder.running.world() is dist.group.WORLD


def recent_collectives() -> list[CollectiveRecord]:
    """Return the last 256 traced collectives of this rank, the oldest first."""
    return list(_records)


def start(call: Call) -> CollectiveRecord:
    """Record a call of this rank; start the thread that answers other ranks if necessary."""
    record = CollectiveRecord(next(_numbers), call.name, call_site(), call.structure())
    _records.append(record)
    _Responder.start_once()
    return record


def compare(call: Call, record: CollectiveRecord) -> None:
    """Raise unless every rank of the group is in this call; every rank must call this."""
    if call.has_headers:
        return
    if len({header.agreed for header in exchange_headers(call, agreed=repr(record.structure))}) > 1:
        raise_disagreement(call)


def ask(store: Any) -> str:
    """Ask all ranks of the default group for their position; return the question's key."""
    question = next(key for key in _questions() if not store.check([key]))
    store.set(question, "?")
    return question


def answers(store: Any, question: str, ranks: Iterable[int]) -> dict[int, str]:
    """Return the answers that have arrived, by rank."""
    keys = {rank: f"{question}/{rank}" for rank in ranks}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def will_answer(store: Any, rank: int) -> bool:
    """Return whether the rank's process is seen running on this host, and so may answer late."""
    key = f"{_WATCHED}/{rank}"
    if not store.check([key]):
        return False
    space, process = store.get(key).decode().split()
    if space != process_space().hex():
        return False
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        # The state follows the name in parentheses; these letters mean dead or stopped.
        return file.read().rpartition(")")[2].split()[0] not in "ZXxTt"
    return False


def _questions() -> Iterator[str]:
    return (f"stepwrap/where/{number}" for number in itertools.count())


class _Responder(threading.Thread):
    """A thread that answers for this rank while the main thread computes, sleeps or waits."""

    running: _Responder | None = None
    lock = threading.RLock()

    def __init__(self, world: dist.ProcessGroup) -> None:
        super().__init__(name="stepwrap-trace", daemon=True)
        # A weak reference, so that a destroyed group can be freed.
        self.world = weakref.ref(world)
        self.rank, self.store = world.rank(), world.get_group_store()
        self.ended = threading.Event()
        # Register before the start: other ranks wait longer for answers of registered processes.
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{_WATCHED}/{self.rank}", f"{process_space().hex()} {os.getpid()}")

    @classmethod
    def start_once(cls) -> None:
        world = dist.group.WORLD
        assert world is not None
        with cls.lock:
            if cls.running is None or cls.running.world() is not world:
                watch = cls(world)
                cls.stop()
                cls.running = watch
                watch.start()

    @classmethod
    def stop(cls) -> None:
        """Stop the thread, because one that uses the store at exit would abort the process."""
        with cls.lock:
            if cls.running is not None:
                cls.running.ended.set()
                # Waits with a timeout, because the process that serves the store may be stopped.
                cls.running.join(_JOIN_S)
                cls.running = None

    def run(self) -> None:
        # An error means that the process that serves the store has ended: no rank can ask any more.
        with contextlib.suppress(RuntimeError):
            questions = _questions()
            question = next(questions)
            while not self.ended.wait(_POLL_S) and self._is_live():
                while self.store.check([question]):
                    self.store.set(f"{question}/{self.rank}", _whereabouts())
                    question = next(questions)
            if self._is_live():
                self.store.delete_key(f"{_WATCHED}/{self.rank}")
        del self.store

    def _is_live(self) -> bool:
        return dist.group.WORLD is not None and dist.group.WORLD is self.world()


def _whereabouts() -> str:
    records = list(_records) if _is_on else []
    running = next((record for record in reversed(records) if record.state == "running"), None)
    if running:
        return f"{IN} {running}"
    main, progress = sys._current_frames().get(threading.main_thread().ident or 0), _progress
    where = f", in {progress()}" if progress else ""
    recent = f"; its last collective was {records[-1]}" if records else ""
    return f"is at {user_site(main)}{where}{recent}"


atexit.register(_Responder.stop)
