"""Processes and threads that tell what went wrong in them."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from ..transport.pickling import Pickler
from ..transport.remote_errors import describe, format_error, rebuild, shorten

__all__ = ["Process", "ProcessException", "Thread", "ThreadException"]

logger = logging.getLogger(__name__)

# A process that has reported goes on to its exit handlers, which may wait for its threads.
_EXIT_S = 5.0
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def default_context() -> Any:
    """Return multiprocessing's default context, or "spawn" in place of "fork".

    A forked process hangs at its first large operation on tensors once its parent has made one.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_context("spawn" if method == "fork" else method)


def use_one_thread() -> None:
    """Have torch, where a forked process has it from its parent, work with one thread.

    OpenMP waits for ever for those of the parent, which are not in this process.
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


class ProcessException(RuntimeError):
    """A process failed. The text has the tracebacks, `__cause__` is the first exception."""


class ThreadException(RuntimeError):
    """A thread failed. The text has the tracebacks, `__cause__` is the first exception."""


class Thread(threading.Thread):
    """A thread that keeps the exceptions raised in it; they are logged as errors as well.

    `sys.exit()` and `sys.exit(0)` in it are no failure.

    Args:
        target: what to run, with `args` and `kwargs`.
        cleaner: is called in the thread after `target`, also when that has failed.
    """

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        cleaner: Callable[[], object] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(group, target, name, args, kwargs, daemon=daemon)
        self._cleaner = cleaner
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Run the target, then the cleaner; keep what they raise."""
        failures = _run_all(super().run, self._cleaner)
        self._cleaner = None
        if failures:
            self._failures = failures
            logger.error("thread %r failed:\n%s", self.name, _text_of(failures))

    @property
    def exception(self) -> ThreadException | None:
        """What was raised, as a new object; None while nothing was."""
        if not self._failures:
            return None
        error = ThreadException(_text_of(self._failures))
        error.__cause__ = self._failures[0]
        return error

    def watch(self) -> None:
        """Raise `exception` if there is one; never waits."""
        error = self.exception
        if error is not None:
            raise error

    def join(self, timeout: float | None = None, *, reraise: bool = False) -> None:
        """Wait until the thread has ended, at most `timeout` seconds.

        Args:
            reraise: then raise `exception` if there is one.
        """
        super().join(timeout)
        if reraise:
            self.watch()


class Process(BaseProcess):
    """A process that reports the exceptions raised in it, and ends with a non-zero exit code then.

    The object is a process of the context `ctx` as well. Functions and classes that the process
    could not import (lambdas, closures) are sent by value. A forked process needs to be sent
    nothing, but there torch, where it is loaded, keeps to one thread.

    `sys.exit()` and `sys.exit(0)` in it are no failure; `sys.exit(code)` keeps its code.

    Args:
        target: what to run, with `args` and `kwargs`.
        cleaner: is called in the process after `target`, also when that has failed (not when a
            signal kills the process).
        ctx: how to start it, from `multiprocessing.get_context` (default: its default
            context, or "spawn" in place of "fork").
    """

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        cleaner: Callable[[], object] | None = None,
        ctx: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        base = (ctx or default_context()).Process
        self.__class__ = _started_by(base, type(self))
        super().__init__(group, target, name, tuple(args), kwargs or {}, daemon=daemon)
        self._cleaner = cleaner
        self._exception: ProcessException | None = None
        self._made_in = os.getpid()
        # A file, for it never blocks its writer as a pipe would while nobody reads.
        self._report = _report_file()
        self._close_report = weakref.finalize(self, os.close, self._report)

    def run(self) -> None:
        """Run the target, then the cleaner; report what they raise and raise the first."""
        if os.getpid() != self._made_in:
            use_one_thread()
        failures = _run_all(super().run, self._cleaner)
        if failures:
            _write_report(self._report, (_text_of(failures), describe(failures[0])))
            raise failures[0]

    @property
    def exception(self) -> ProcessException | None:
        """What was raised, or how the process was ended; None while it has not failed."""
        if self._exception is None and self._close_report.alive:
            # First the exit code: what ended in between has reported before.
            exitcode = self.exitcode
            report = _read_report(self._report)
            if report is not None:
                text, described = report
                self._exception = ProcessException(text)
                self._exception.__cause__ = rebuild(described)
                # The text has the traceback.
                self._exception.__cause__.__cause__ = None
            elif exitcode:
                where = f"process {self.name!r} (pid {self.pid}) {how_it_ended(exitcode)}"
                without = " and without a report (os._exit?)" if exitcode > 0 else ""
                self._exception = ProcessException(where + without)
        return self._exception

    def watch(self) -> None:
        """Raise `exception` if there is one; waits only for the exit of a failed process."""
        error = self.exception
        if error is not None:
            self.join(_EXIT_S)
            raise error

    def close(self) -> None:
        """Give back what the ended process holds here; `exception` can still be read."""
        self.exception  # noqa: B018
        super().close()
        self._close_report()

    def __reduce__(self) -> tuple[Callable[[bytes], Process], tuple[bytes]]:
        multiprocessing.context.assert_spawning(self)
        state = {key: value for key, value in vars(self).items() if key != "_close_report"}
        state["_report"] = DupFd(self._report)
        pickler = _SpawnPickler(io.BytesIO())
        return _revived, (pickler.message((*type(self).__bases__, state)),)


def how_it_ended(exitcode: int | None) -> str:
    """Return in words how a process ended."""
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"left with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode in CRASHES:
        return f"was killed by {name} (a crash in compiled code)"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class _SpawnPickler(Pickler):
    """Knows what may travel to a process that is being started: locks, connections, queues."""

    def __init__(self, file: io.BytesIO) -> None:
        known: Any = {**Pickler.dispatch_table, **ForkingPickler(file).dispatch_table}
        self.dispatch_table = known
        super().__init__(file)


def _started_by(base: type[BaseProcess], kind: type[Process]) -> type[Process]:
    """Return `kind` as a subclass of a context's process class, which knows how to start it."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, base), names)


def _revived(data: bytes) -> Process:
    kind, base, state = pickle.loads(data)
    made = _started_by(base, kind)
    process = made.__new__(made)
    vars(process).update(state, _report=state["_report"].detach(), _made_in=os.getpid())
    process._close_report = weakref.finalize(process, os.close, process._report)
    return process


def _run_all(target: Callable[[], object], cleaner: Callable[[], object] | None) -> list[Any]:
    """Call both and return what they raised, which for `sys.exit(0)` is nothing."""
    failures: list[Any] = []
    pid = os.getpid()
    for step in filter(None, (target, cleaner)):
        try:
            step()
        except BaseException as error:
            if os.getpid() != pid:
                raise
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                failures.append(error)
        # A child that the target has forked and that comes out of it: nothing here is its own.
        if os.getpid() != pid:
            break
    return failures


def _text_of(failures: list[BaseException]) -> str:
    blocks = (f"Exception {i}:\n{format_error(e)}" for i, e in enumerate(failures, 1))
    return shorten("\n\n".join(blocks))


def _report_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stepwrap-report")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_report(file: int, report: tuple[str, bytes]) -> None:
    data = pickle.dumps(report)
    # Last the mark at the beginning, so that there is nothing to read before all is there.
    if os.pwrite(file, data, 1) == len(data):
        os.pwrite(file, b"!", 0)


def _read_report(file: int) -> tuple[str, bytes] | None:
    if os.pread(file, 1, 0) != b"!":
        return None
    report: tuple[str, bytes] = pickle.loads(os.pread(file, os.fstat(file).st_size, 1))
    return report
