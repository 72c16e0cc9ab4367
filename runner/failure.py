"""Picklable descriptions of errors, and errors that name the config section they concern."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..registry import Config, ConfigError, Problem, causes, key_noted_on, user_frame

# The largest number of processes per core.
_PER_CORE = 4
# Texts of torch's errors after the loss of a peer, and of the libraries from which they come.
_LOST = ("by peer", "Broken pipe", "NCCL error")
_LIBRARIES = ("gloo", "NCCL")
# torch puts this line above the traceback of a data-loading worker.
_WORKER_TRACEBACK = "Original Traceback (most recent call last)"


def _has_lost_peer(error: BaseException) -> bool:
    """Return whether a collective has failed, or torch has lost the connection to another rank."""
    names = {(base.__module__, base.__name__) for base in type(error).__mro__}
    if ("stepwrap.collectives.errors", "CollectiveError") in names:
        return True
    text = str(error)
    # A user's program may have an error with the same text, such as a BrokenPipeError.
    is_torchs = type(error).__module__.startswith("torch") or any(lib in text for lib in _LIBRARIES)
    return isinstance(error, RuntimeError) and is_torchs and any(phrase in text for phrase in _LOST)


@dataclass(frozen=True)
class RankFailure:
    """The error of one rank."""

    kind: str
    message: str
    location: str  # the user's innermost "file:line in function", or empty
    trace: str
    rank: int | None = None
    time: float = field(default_factory=time.time)
    # Further lines, such as the layer of the model and the batch in which the error occurred.
    notes: list[str] = field(default_factory=list)
    # Whether another rank's failure may be the cause: a lost peer or an aborted collective.
    may_follow: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> RankFailure:
        """Describe ``error``, with the line in the user's files that led to it."""
        kind, message = type(error).__name__, str(error).strip()
        all_notes = (note for cause in causes(error) for note in getattr(cause, "__notes__", []))
        notes = [note for note in all_notes if note not in message]
        if _WORKER_TRACEBACK in message:
            # The worker's own message follows its traceback, whose lines are indented.
            lines = message.splitlines()
            trace_lines = (" ", _WORKER_TRACEBACK)
            end = max(n for n, line in enumerate(lines) if line.startswith(trace_lines))
            text = lines[end + 1 :] or lines[-1:]
            message = f"{text[0].removeprefix(f'{kind}: ')} ({lines[0].strip().rstrip('.')})"
            notes = text[1:] + notes
        trace = "".join(traceback.format_exception(error))
        may_follow = any(map(_has_lost_peer, causes(error)))
        location = _find_location(error)
        return cls(kind, message, location, trace, rank, notes=notes, may_follow=may_follow)

    @classmethod
    def of_end(cls, exitcode: int | None, rank: int) -> RankFailure:
        """Describe a process that ended without reporting an error.

        A negative exit code -n means that signal n killed it.
        """
        kind, how = "ProcessEnded", f"exited with code {exitcode}"
        text = f"the process {'ended' if exitcode is None else how} before its work was done"
        if exitcode is not None and exitcode < 0:
            hint = ": is the machine out of memory?" if exitcode == -signal.SIGKILL else ""
            kind = "ProcessKilled"
            text = f"the process was killed by {signal.Signals(-exitcode).name}{hint}"
        # Libraries of collectives abort the process.
        return cls(kind, text, "", text, rank, may_follow=exitcode == -signal.SIGABRT)

    def lines(self) -> Iterator[str]:
        """Yield the lines that are shown to the user."""
        where = "" if self.rank is None else f" (rank {self.rank})"
        yield f"{self.kind}: {self.message}{where}" if self.message else f"{self.kind}{where}"
        if self.location:
            yield f"  at {self.location}"
        for note in self.notes:
            yield f"  {note}"


class LaunchError(RuntimeError):
    """Raised by the launcher if a rank failed.

    Attributes:
        failures: the errors of all ranks, the cause first.
        signal: the number of the stop signal that the launcher has received, or 0.
    """

    def __init__(self, failures: Sequence[RankFailure], *, signal: int = 0) -> None:
        self.failures = list(failures)
        self.signal = signal
        super().__init__("\n".join(self.failures[0].lines()))


class OversubscribedError(ValueError):
    """Raised if the machine has too few cores or too little memory for the processes to start."""

    def __init__(self, message: str) -> None:
        flags = "--oversubscribe, launch.oversubscribe: true or launch(oversubscribe=True)"
        super().__init__(f"{message}; {flags} starts them anyway")


def require_cores(nproc: int) -> None:
    """Raise OversubscribedError if the machine has too few cores for ``nproc`` processes."""
    # macOS has no sched_getaffinity.
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    cores = len(affinity(0))
    if nproc > _PER_CORE * cores:
        raise OversubscribedError(
            f"{nproc} processes are too many for the {cores} cores of this machine: at most "
            f"{_PER_CORE} for each, {_PER_CORE * cores} in all"
        )


class TrainingFailed(RuntimeError):
    """Raised if training failed but can be resumed; ``__cause__`` is the error.

    Attributes:
        config: the config that the run wrote, or the URL of its folder.
        saved: its last checkpoint, or None.
        aside: its last incomplete checkpoint, or None.
    """

    def __init__(self, config: str, saved: Path | None, aside: Path | None) -> None:
        super().__init__(f"the last checkpoint is {saved or aside}")
        self.config = config
        self.saved = saved
        self.aside = aside


class Terminated(BaseException):
    """Raised if a signal such as SIGTERM ends a command at once, without an orderly stop.

    ``saved`` is the last checkpoint that the run saved, or an empty string.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.saved = saved


class BuildError(RuntimeError):
    """Raised if a part cannot be built from its config section.

    Attributes:
        section: the key path of the section.
        cause: the original error.
        others: the errors of other parts that could not be built.
    """

    def __init__(self, section: str, cause: BaseException) -> None:
        super().__init__(section, cause)
        self.section = section
        self.cause = cause
        self.others: list[BuildError] = []
        text = str(cause).strip()
        for prefix in (section, section.rpartition(".")[2]):
            text = text.removeprefix(f"{prefix}: ")
        notes = getattr(cause, "__notes__", [])
        self.what = "; ".join([f"cannot be built: {type(cause).__name__}: {text}", *notes])

    def __str__(self) -> str:
        message = f"{self.section}: {self.what}"
        return "\n".join(dict.fromkeys((message, *map(str, self.others))))


@contextmanager
def as_mistakes_in(config: Config) -> Iterator[None]:
    """Turn a ``BuildError`` into a ``ConfigError`` with the line of each section in ``config``."""
    try:
        yield
    except BuildError as error:
        problems = []
        for build_error in (error, *error.others):
            where = _find_location(build_error.cause)
            message = f"{build_error.what}\n  at {where}" if where else build_error.what
            problems.append(
                Problem(build_error.section, message, config.origin(build_error.section))
            )
        raise ConfigError(list(dict.fromkeys(problems))) from error.cause


class BuildErrors:
    """Collects the errors of parts that are built independently, and raises them together."""

    def __init__(self) -> None:
        self._errors: list[BuildError] = []

    @contextmanager
    def collect(self, section: str) -> Iterator[None]:
        """Collect the error of the block, which builds ``section``; the program continues below."""
        try:
            with building(section):
                yield
        except BuildError as error:
            self._errors += [error, *error.others]

    def raise_all(self) -> None:
        """Raise one BuildError with all collected errors, if there are any."""
        if self._errors:
            head_error, *other_errors = self._errors
            head_error.others = other_errors
            raise head_error


@contextmanager
def building(section: str, options: Iterable[str] = ()) -> Iterator[None]:
    """Turn errors into a ``BuildError`` that names the config section and the key, if known.

    The key is the one that ``build_tree`` noted on the error. Without such a note, it is the first
    of ``options`` that the error text mentions.
    """
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        words = re.findall(r"\w+", str(error))
        key = key_noted_on(error) or next((word for word in words if word in options), "")
        raise BuildError(f"{section}.{key}" if key else section, error) from error


def _find_location(error: BaseException) -> str:
    frame = user_frame(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}"
