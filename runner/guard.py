"""Start ranks and see them to their end: signals go down, nothing outlives the launcher."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from .failure import Failure, Terminated
from .watch_parent import STOP_SIGNALS

# The end of a terminal, and the warning that a scheduler sends before it ends a job.
COUNT_AS_SIGTERM = (signal.SIGHUP, signal.SIGUSR1)

_GRACE_S = 3.0
# How long a rank may go on saving after another one has failed.
_SAVING_S = 600.0
_POLL_S = 0.05


@contextmanager
def with_parent_watched() -> Iterator[None]:
    """Make processes that are spawned meanwhile die with this one, from their first line on.

    Their own imports, which take seconds, come later. A process spawned by another thread at the
    same time is treated alike.
    """
    watch = str(Path(__file__).with_name("watch_parent.py"))
    first = f"import runpy; runpy.run_path({watch!r})['die_with_parent']({os.getpid()})"
    plain = spawn.get_command_line

    def with_watch(**options: Any) -> list[str]:
        command = plain(**options)
        code = command.index("-c") + 1
        return [*command[:code], f"{first}\n{command[code]}", *command[code + 1 :]]

    spawn.get_command_line = with_watch
    try:
        yield
    finally:
        spawn.get_command_line = plain


def heed_signals() -> None:
    """Let stop signals through and deliver those that waited."""
    for number in COUNT_AS_SIGTERM:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, pass_on_as_sigterm)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def pass_on_as_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle a signal as SIGTERM is handled at that time: a running training saves and stops."""
    signal.raise_signal(signal.SIGTERM)


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


def own_memory() -> int:
    """Return the bytes of this process; on Linux without the libraries, which it shares."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("RssAnon:")[2].split()[0])
    # In bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class _Rank:
    process: SpawnProcess
    words: Connection
    # Its memory when it got ready, in bytes; None before.
    memory: int | None = None
    is_told: bool = False
    is_killed: bool = False


class Ranks:
    """The processes of a launch, from their start to their end.

    Each sends its memory (bytes, a number) through a pipe when it is ready for signals, and then
    its pickled result or its `Failure`. One that ends without either has failed, whatever its exit
    code. After a failure the others have a few seconds to end, then they are killed; one that has
    a file `saving_*` in `folder` gets 10 minutes.

    Attributes:
        results: What each rank has returned, pickled, by its number.
        failures: Errors of ranks, and ends without one.
        received: The stop signals that this process has got, in their order, with SIGTERM
            for each of `COUNT_AS_SIGTERM`. Ranks get the first one. A second Ctrl-C kills them.
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
        """Start a process that calls `main(pipe, *args)`, and dies with this one."""
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        with theirs, with_parent_watched():
            process = context.Process(target=main, args=(theirs, *args))
            process.start()
        self._running[rank] = _Rank(process, ours)

    def wait(self) -> None:
        """Wait until all have ended, and fill `results` and `failures`."""
        while self._running:
            self._look()

    def memory_of(self, rank: int) -> int:
        """Wait until a rank has made its imports; returns its memory in bytes, 0 if it failed."""
        one = self._running[rank]
        while one.memory is None and rank in self._running:
            self._look()
        return one.memory or 0

    def _look(self) -> None:
        open_pipes = [one.words for one in self._running.values() if not one.words.closed]
        wait([*open_pipes, *(one.process.sentinel for one in self._running.values())], _POLL_S)
        for rank, one in list(self._running.items()):
            # Its last message has arrived once it has ended.
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
                elif isinstance(said, int):
                    one.memory = said
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
        for one in self._running.values():
            if one.memory is not None and not one.is_told:
                one.is_told = True
                with suppress(ProcessLookupError):
                    os.kill(one.process.pid or 0, self.received[0])

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
    with with_variables({"PYTHONWARNINGS": quiet}), blocking_signals():
        # It removes the semaphores that killed ranks leave, of which the user need not read.
        # Started later, by the first process, it would lift the block of signals. It ignores
        # SIGTERM and Ctrl-C, and keeps the block of the others.
        resource_tracker.ensure_running()

    def note(number: int, frame: FrameType | None) -> None:
        ranks.received.append(signal.SIGTERM if number in COUNT_AS_SIGTERM else number)

    # A handler of the program's own stays, and what nohup has this process ignore is ignored.
    free = [
        n for n in COUNT_AS_SIGTERM if signal.getsignal(n) in (signal.SIG_DFL, pass_on_as_sigterm)
    ]
    with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM, *free), note)):
        yield


@contextmanager
def blocking_signals() -> Iterator[None]:
    """Have stop signals wait, in this thread and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
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
