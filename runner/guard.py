"""Start ranks and see them to their end: signals go down, nothing outlives the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from .failure import Failure, Terminated

_PR_SET_PDEATHSIG = 1
_RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 3.0
# How long a rank may go on saving after another one has failed.
_SAVING_S = 600.0
_POLL_S = 0.05


def die_with_parent(parent: int) -> None:
    """Make this process die when its launcher, process `parent`, does; also leave its group.

    A terminal sends Ctrl-C to a whole process group: in a group of its own a rank gets it once,
    from the launcher. Stop signals wait until `heed_signals`.
    """
    os.setpgid(0, 0)
    for number in _RELAYED:
        # Ignoring drops what came to the group while this process was starting.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def heed_signals() -> None:
    """Let stop signals through, those that have come since `die_with_parent` at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RELAYED)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def host_identity() -> str:
    """Return what processes share among which a process number means the same."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"


def is_running(pid: int) -> bool:
    """Whether a process of this host is running; a zombie is not."""
    try:
        os.kill(pid, 0)
        # "7 (a name) Z ...": off Linux there is no such file, and no telling.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self/stat").exists()
    return state not in "ZX"


@dataclass
class _Rank:
    process: SpawnProcess
    words: Connection
    is_ready: bool = False
    is_told: bool = False
    is_killed: bool = False


class Ranks:
    """The processes of a launch, from their start to their end.

    Each sends None through a pipe when it is ready for signals, and then its pickled result
    (bytes) or its `Failure`. One that ends without either has failed, whatever its exit code.
    After a failure the others have a few seconds to end, then they are killed; one that has a file
    `saving_*` in `folder` gets 10 minutes.

    Attributes:
        results: What each rank has returned, pickled, by its number.
        failures: Errors of ranks, and ends without one.
        received: The stop signals that this process has got, in their order. Ranks get the same,
            but for the end of a terminal, SIGHUP, which reaches them as SIGTERM. A second Ctrl-C
            kills them.
    """

    def __init__(self, folder: Path) -> None:
        self.results: dict[int, bytes] = {}
        self.failures: list[Failure] = []
        self.received: list[int] = []
        self._folder = folder
        self._running: dict[int, _Rank] = {}
        self._deadline = self._last_deadline = float("inf")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill those that still run, and wait for their end."""
        for one in self._running.values():
            one.process.kill()
            one.process.join()

    def start(self, rank: int, main: Callable[..., None], *args: Any) -> None:
        """Start a process that calls `main(pid of this process, pipe, *args)`."""
        spawn = get_context("spawn")
        ours, theirs = spawn.Pipe(duplex=False)
        with theirs:
            process = spawn.Process(target=main, args=(os.getpid(), theirs, *args))
            process.start()
        self._running[rank] = _Rank(process, ours)

    def wait(self) -> None:
        """Wait until all have ended, and fill `results` and `failures`."""
        while self._running:
            open_pipes = [one.words for one in self._running.values() if not one.words.closed]
            wait([*open_pipes, *(one.process.sentinel for one in self._running.values())], _POLL_S)
            for rank, one in list(self._running.items()):
                # What it has sent last is there once it has ended.
                has_ended = not one.process.is_alive()
                self._listen(rank, one)
                if has_ended:
                    one.words.close()
                    self._note_end(rank, self._running.pop(rank))
            self._pass_signals_on()
            self._end_the_late()

    def _listen(self, rank: int, one: _Rank) -> None:
        try:
            while not one.words.closed and one.words.poll():
                said = one.words.recv()
                if isinstance(said, Failure):
                    self._fail(said)
                elif said is None:
                    one.is_ready = True
                else:
                    self.results[rank] = said
        except (EOFError, OSError):
            one.words.close()

    def _note_end(self, rank: int, one: _Rank) -> None:
        code = one.process.exitcode or 0
        if self.failures and self.failures[0].rank == rank:
            # Only now do the others lose their connections to it.
            self._deadline = time.monotonic() + _GRACE_S
        has_spoken = rank in self.results or any(rank == told.rank for told in self.failures)
        if (has_spoken and code >= 0) or one.is_killed:
            return
        # What a signal has ended, or a handler of the user's for it, has not failed.
        if not self.received or (code < 0 and -code not in (*self.received, signal.SIGTERM)):
            self._fail(Failure.of_end(code, rank))

    def _fail(self, failure: Failure) -> None:
        if not self.failures:
            now = time.monotonic()
            self._deadline, self._last_deadline = now + _GRACE_S, now + _SAVING_S
        self.failures.append(failure)

    def _pass_signals_on(self) -> None:
        if not self.received:
            return
        number = signal.SIGTERM if self.received[0] == signal.SIGHUP else self.received[0]
        for one in self._running.values():
            if one.is_ready and not one.is_told:
                one.is_told = True
                with suppress(ProcessLookupError):
                    os.kill(one.process.pid or 0, number)

    def _end_the_late(self) -> None:
        now = time.monotonic()
        if now < self._last_deadline < float("inf") and any(self._folder.glob("saving_*")):
            self._deadline = max(self._deadline, now + _GRACE_S)
        if now > self._deadline or self.received.count(signal.SIGINT) > 1:
            for one in self._running.values():
                one.is_killed = True
                one.process.kill()


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals so, where this is the main thread; afterwards as before."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def receiving_signals(ranks: Ranks) -> Iterator[None]:
    """Note this process's stop signals in `ranks`; those started here begin with them blocked."""
    quiet = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    with environment({"PYTHONWARNINGS": quiet}):
        # It removes the semaphores that killed ranks leave, of which the user need not read.
        # Started later, by the first process, it would lift the block of signals.
        resource_tracker.ensure_running()
    # What nohup has this process ignore stays ignored.
    heeded = [n for n in _RELAYED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    with handling(dict.fromkeys(heeded, lambda number, _: ranks.received.append(number))):
        yield


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Have stop signals wait, in this thread and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RELAYED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def raising_stops() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` and Ctrl-C KeyboardInterrupt, unless others handle them."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise _stop(number)

    heeded = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    with handling(dict.fromkeys(heeded, stop)):
        try:
            yield
        except Exception as error:
            if not received:
                raise
            # Raised in the middle of an import, for instance, it may come out as another error.
            raise _stop(received[0]) from error


def _stop(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables, for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
