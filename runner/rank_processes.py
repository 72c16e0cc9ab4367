"""Start ranks, forward signals to them, and kill them if the launcher dies."""

from __future__ import annotations

import os
import resource
import signal
import socket
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

from ..primitives import parent_watch, stop_signals
from ..primitives.stop_signals import (
    COUNT_AS_SIGTERM,
    blocking_signals,
    handling,
    heeded_signals,
    pass_on_as_sigterm,
)
from .failure import RankFailure, Terminated

# Seconds that ranks may continue after another rank failed: normally, and while a rank is saving.
_GRACE_S = 3.0
_SAVING_S = 600.0
_POLL_S = 0.05


@contextmanager
def add_parent_watch() -> Iterator[None]:
    """Make processes that are spawned inside this context die when this process dies.

    The watch starts before the process imports anything, which may take seconds. It also applies
    to processes that other threads spawn at the same time.
    """
    signals, watch = stop_signals.__file__, parent_watch.__file__
    prelude = (
        f"import runpy; runpy.run_path({signals!r})['leave_process_group'](); "
        f"runpy.run_path({watch!r})['end_with_parent']({os.getpid()})"
    )
    plain = spawn.get_command_line

    def add_watch(**options: Any) -> list[str]:
        command = plain(**options)
        code = command.index("-c") + 1
        return [*command[:code], f"{prelude}\n{command[code]}", *command[code + 1 :]]

    spawn.get_command_line = add_watch
    try:
        yield
    finally:
        spawn.get_command_line = plain


def host_identity() -> str:
    """Return an identifier of the host and its PID namespace, within which a PID is unique."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"


def is_running(pid: int) -> bool:
    """Return whether a process of this host is running; a zombie is not."""
    try:
        os.kill(pid, 0)
        # The file reads "7 (name) Z ...". It exists on Linux only.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self/stat").exists()
    return state not in "ZX"


def own_memory() -> int:
    """Return the bytes of memory that this process uses.

    On Linux only anonymous memory counts, not shared libraries.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("RssAnon:")[2].split()[0])
    # macOS reports bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class _Rank:
    process: SpawnProcess
    pipe: Connection
    # In bytes, once the rank is ready for signals; None before.
    memory: int | None = None
    has_signal: bool = False
    is_killed: bool = False


class Ranks:
    """The processes of a launch.

    When a rank is ready for signals, it sends its memory (int, in bytes) through a pipe, and later
    its pickled result or its ``RankFailure``. A rank that ends without either has failed, whatever
    its exit code, unless this process received a stop signal. After a failure, ranks that have not
    ended within a few seconds are killed. They have up to 10 minutes while one of them saves a
    checkpoint, which a file ``saving_*`` in ``folder`` shows.

    Args:
        folder: the private folder of the launch.
        display: called several times per second and once after the end of each rank.

    Attributes:
        results: the pickled result of each rank, by rank.
        failures: the errors of ranks, including those that ended without reporting one.
        received: the stop signals that this process received, in order. Signals in
            ``COUNT_AS_SIGTERM`` are recorded as SIGTERM. The first one is forwarded to the ranks.
            A second Ctrl-C kills them.
    """

    def __init__(self, folder: Path, display: Callable[[], None]) -> None:
        self.results: dict[int, bytes] = {}
        self.failures: list[RankFailure] = []
        self.received: list[int] = []
        self._folder, self._display = folder, display
        self._running: dict[int, _Rank] = {}
        self._deadline = self._last_deadline = float("inf")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the ranks that are still running and wait until they have ended."""
        for member in self._running.values():
            member.process.kill()
            member.process.join()

    def start(self, rank: int, main: Callable[..., None], *args: Any) -> None:
        """Start a process that calls ``main(pipe, *args)`` and dies when this process dies."""
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        with sender, add_parent_watch():
            process = context.Process(target=main, args=(sender, *args))
            process.start()
        self._running[rank] = _Rank(process, receiver)

    def wait(self) -> None:
        """Wait until all ranks have ended, and fill ``results`` and ``failures``."""
        while self._running:
            self._poll()

    def get_memory(self, rank: int) -> int:
        """Wait for a rank to finish its imports; return its memory in bytes, 0 if it failed."""
        member = self._running[rank]
        while member.memory is None and rank in self._running:
            self._poll()
        return member.memory or 0

    def _poll(self) -> None:
        open_pipes = [member.pipe for member in self._running.values() if not member.pipe.closed]
        wait(
            [*open_pipes, *(member.process.sentinel for member in self._running.values())], _POLL_S
        )
        for rank, member in list(self._running.items()):
            # Check this before receiving: if a rank has ended, all its messages have arrived.
            has_ended = not member.process.is_alive()
            self._receive(rank, member)
            if has_ended:
                member.pipe.close()
                self._note_end(rank, self._running.pop(rank))
        self._display()
        self._pass_signals_on()
        self._kill_overdue()

    def _receive(self, rank: int, member: _Rank) -> None:
        try:
            while not member.pipe.closed and member.pipe.poll():
                message = member.pipe.recv()
                if isinstance(message, RankFailure):
                    self._fail(message)
                elif isinstance(message, int):
                    member.memory = message
                else:
                    self.results[rank] = message
        except (EOFError, OSError):
            member.pipe.close()

    def _note_end(self, rank: int, member: _Rank) -> None:
        code = member.process.exitcode or 0
        if self.failures and self.failures[0].rank == rank:
            # Only now the others lose their connections to it: their grace period starts here.
            self._deadline = time.monotonic() + _GRACE_S
        has_reported = rank in self.results or any(
            rank == failure.rank for failure in self.failures
        )
        if (has_reported and code >= 0) or member.is_killed:
            return
        # After a stop signal, a rank has not failed if the signal killed it or it exited itself.
        if not self.received or (code < 0 and -code not in (*self.received, signal.SIGTERM)):
            self._fail(RankFailure.of_end(code, rank))

    def _fail(self, failure: RankFailure) -> None:
        if not self.failures:
            now = time.monotonic()
            self._deadline, self._last_deadline = now + _GRACE_S, now + _SAVING_S
        self.failures.append(failure)

    def _pass_signals_on(self) -> None:
        if not self.received:
            return
        for member in self._running.values():
            if member.memory is not None and not member.has_signal:
                member.has_signal = True
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid or 0, self.received[0])

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        if now < self._last_deadline < float("inf") and any(self._folder.glob("saving_*")):
            self._deadline = max(self._deadline, now + _GRACE_S)
        if now > self._deadline or self.received.count(signal.SIGINT) > 1:
            for member in self._running.values():
                member.is_killed = True
                member.process.kill()


@contextmanager
def receiving_signals(ranks: Ranks) -> Iterator[None]:
    """Record this process's stop signals in ``ranks.received``."""
    quiet = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    with set_variables({"PYTHONWARNINGS": quiet}), blocking_signals():
        # The tracker removes the semaphores of killed ranks, without a warning to the user. Start
        # it here: if the first Process.start() started it, it would unblock SIGINT and SIGTERM.
        resource_tracker.ensure_running()

    def note(number: int, frame: FrameType | None) -> None:
        ranks.received.append(signal.SIGTERM if number in COUNT_AS_SIGTERM else number)

    # Keep the program's own handlers.
    free = [
        n for n in COUNT_AS_SIGTERM if signal.getsignal(n) in (signal.SIG_DFL, pass_on_as_sigterm)
    ]
    with handling(dict.fromkeys((*heeded_signals(), *free), note)):
        yield


@contextmanager
def raising_stops() -> Iterator[None]:
    """Raise ``Terminated`` on SIGTERM and KeyboardInterrupt on Ctrl-C, unless they are ignored."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise stop_error(number)

    with handling(dict.fromkeys(heeded_signals(), stop)):
        try:
            yield
        except Exception as error:
            if not received:
                raise
            # An import, for instance, may replace the handler's exception with another error.
            raise stop_error(received[0]) from error


def stop_error(number: int) -> BaseException:
    """Return ``KeyboardInterrupt`` for Ctrl-C, and ``Terminated`` for another stop signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in this context."""
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
