"""Processes and threads that report the exceptions raised in them."""

from __future__ import annotations

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
from multiprocessing.reduction import DupFd
from typing import Any

from ..transport.pickling import dumps
from ..transport.remote_errors import describe, format_error, rebuild, shorten

__all__ = ["Process", "ProcessException", "Thread", "ThreadException"]

logger = logging.getLogger(__name__)

# How long `watch` waits until a failed process, which may still run exit handlers, has ended.
_EXIT_S = 5.0
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def default_context() -> Any:
    """Return multiprocessing's default context, or "spawn" if the default is "fork".

    A forked process hangs in its first large tensor operation if the parent has already run one.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_context("spawn" if method == "fork" else method)


def use_one_thread() -> None:
    """Make torch use one thread if it is imported.

    In a forked process, OpenMP would wait forever for the threads of the parent.
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


class ProcessException(RuntimeError):
    """A process failed. ``__cause__`` is the first exception, if the process reported one.

    The text contains the tracebacks, or describes how the process ended.
    """


class ThreadException(RuntimeError):
    """A thread failed. The text contains the tracebacks; ``__cause__`` is the first exception."""


class Thread(threading.Thread):
    """A thread that keeps the exceptions raised in it and logs them as errors.

    ``sys.exit()`` and ``sys.exit(0)`` do not count as failures.

    Args:
        target: the function to run, with ``args`` and ``kwargs``.
        cleaner: called in the thread after ``target``, even if ``target`` has failed.
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
        """Run the target, then the cleaner; keep the exceptions that they raise."""
        failures = _run_all(super().run, self._cleaner)
        self._cleaner = None
        if failures:
            self._failures = failures
            logger.error("thread %r failed:\n%s", self.name, _format_text(failures))

    @property
    def exception(self) -> ThreadException | None:
        """A new ``ThreadException`` if the thread has failed, otherwise None."""
        if not self._failures:
            return None
        error = ThreadException(_format_text(self._failures))
        error.__cause__ = self._failures[0]
        return error

    def watch(self) -> None:
        """Raise ``exception`` if there is one, without waiting."""
        error = self.exception
        if error is not None:
            raise error

    def join(self, timeout: float | None = None, *, reraise: bool = False) -> None:
        """Wait until the thread has ended, at most ``timeout`` seconds.

        Args:
            timeout: the limit in seconds (default: none).
            reraise: raise ``exception`` afterwards if there is one.
        """
        super().join(timeout)
        if reraise:
            self.watch()


class Process(BaseProcess):
    """A process that reports the exceptions raised in it.

    The object is also an instance of the process class of ``ctx``. Functions and classes that the
    process cannot import (lambdas, closures) are sent by value. In a forked process torch uses one
    thread, if it is imported.

    If an exception is raised, the exit code is not zero. ``sys.exit()`` and ``sys.exit(0)`` do not
    count as failures; ``sys.exit(code)`` keeps its code.

    Args:
        target: the function to run, with ``args`` and ``kwargs``.
        cleaner: called in the process after ``target``, even if ``target`` has failed, but not if a
            signal kills the process.
        ctx: a context from ``multiprocessing.get_context`` (default: multiprocessing's default
            context, or "spawn" if the default is "fork").
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
        # A file, because a pipe could block the process until the report is read.
        self._report = _report_file()
        self._close_report = weakref.finalize(self, os.close, self._report)

    def run(self) -> None:
        """Run the target, then the cleaner; report their exceptions and raise the first."""
        if os.getpid() != self._made_in:
            use_one_thread()
        failures = _run_all(super().run, self._cleaner)
        if failures:
            _write_report(self._report, (_format_text(failures), describe(failures[0])))
            raise failures[0]

    @property
    def exception(self) -> ProcessException | None:
        """A ``ProcessException`` if the process has failed, otherwise None."""
        if self._exception is None and self._close_report.alive:
            # Read the exit code first: a process that has ended has already written its report.
            exitcode = self.exitcode
            report = _read_report(self._report)
            if report is not None:
                text, described = report
                self._exception = ProcessException(text)
                self._exception.__cause__ = rebuild(described)
                # The text already contains the traceback.
                self._exception.__cause__.__cause__ = None
            elif exitcode:
                where = f"process {self.name!r} (pid {self.pid}) {how_it_ended(exitcode)}"
                without = " without reporting an exception (os._exit?)" if exitcode > 0 else ""
                self._exception = ProcessException(where + without)
        return self._exception

    def watch(self) -> None:
        """Raise ``exception`` if there is one, after waiting at most 5 s for the process to end."""
        error = self.exception
        if error is not None:
            self.join(_EXIT_S)
            raise error

    def close(self) -> None:
        """Release the resources of the ended process; ``exception`` can still be read."""
        self.exception  # noqa: B018
        super().close()
        self._close_report()

    def __reduce__(self) -> tuple[Callable[[bytes], Process], tuple[bytes]]:
        multiprocessing.context.assert_spawning(self)
        state = {key: value for key, value in vars(self).items() if key != "_close_report"}
        state["_report"] = DupFd(self._report)
        return _load_process, (dumps((*type(self).__bases__, state), copy_tensor=False),)


def how_it_ended(exitcode: int | None) -> str:
    """Return a description of how a process ended."""
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode in CRASHES:
        return f"was killed by {name} (a crash in compiled code)"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _started_by(base: type[BaseProcess], kind: type[Process]) -> type[Process]:
    """Return a subclass of ``kind`` and of ``base``, the process class of a context."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, base), names)


def _load_process(data: bytes) -> Process:
    kind, base, state = pickle.loads(data)
    started = _started_by(base, kind)
    process = started.__new__(started)
    vars(process).update(state, _report=state["_report"].detach(), _made_in=os.getpid())
    process._close_report = weakref.finalize(process, os.close, process._report)
    return process


def _run_all(target: Callable[[], object], cleaner: Callable[[], object] | None) -> list[Any]:
    """Call both; return their exceptions, except ``SystemExit`` with code 0 or None."""
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
        # In a process that the target has forked: only the original process runs the cleaner.
        if os.getpid() != pid:
            break
    return failures


def _format_text(failures: list[BaseException]) -> str:
    blocks = (f"Exception {i}:\n{format_error(e)}" for i, e in enumerate(failures, 1))
    return shorten("\n\n".join(blocks))


def _report_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stepwrap-report")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_report(file: int, report: tuple[str, bytes]) -> None:
    data = pickle.dumps(report)
    # The mark at the beginning is written last, so that readers ignore an incomplete report.
    if os.pwrite(file, data, 1) == len(data):
        os.pwrite(file, b"!", 0)


def _read_report(file: int) -> tuple[str, bytes] | None:
    if os.pread(file, 1, 0) != b"!":
        return None
    report: tuple[str, bytes] = pickle.loads(os.pread(file, os.fstat(file).st_size, 1))
    return report
