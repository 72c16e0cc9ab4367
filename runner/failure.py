"""Errors of a run, in a few lines, picklable, with the section of the config that they concern."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..registry import Config, ConfigError, Problem, causes, key_noted_on, user_frame

T = TypeVar("T")
# What torch puts above the traceback of a data-loading worker.
_OF_WORKER = "Original Traceback (most recent call last)"


@dataclass(frozen=True)
class Failure:
    """One rank's error."""

    kind: str
    message: str
    location: str  # the user's innermost "file:line in function", or empty
    trace: str
    rank: int | None = None
    time: float = field(default_factory=time.time)
    # Which part of the model, which batch.
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """Describe `error`, with the place in the user's own files that led to it."""
        kind, message = type(error).__name__, str(error).strip()
        told = (note for one in causes(error) for note in getattr(one, "__notes__", []))
        notes = [note for note in told if note not in message]
        if _OF_WORKER in message:
            # The lines that follow the worker's traceback, in which all are indented.
            lines = message.splitlines()
            indented = [n for n, one in enumerate(lines) if one.startswith((" ", _OF_WORKER))]
            said = lines[indented[-1] + 1 :] or lines[-1:]
            message = f"{said[0].removeprefix(f'{kind}: ')} ({lines[0].strip().rstrip('.')})"
            notes = said[1:] + notes
        trace = "".join(traceback.format_exception(error))
        return cls(kind, message, _location_of(error), trace, rank, notes=notes)

    @classmethod
    def of_end(cls, exitcode: int | None, rank: int) -> Failure:
        """Describe the end of a process without an error; -n is its end by signal n."""
        kind, how = "ProcessEnded", f"exited with code {exitcode}"
        text = f"the process {'ended' if exitcode is None else how} before its work was done"
        if exitcode is not None and exitcode < 0:
            hint = ": is the machine out of memory?" if exitcode == -signal.SIGKILL else ""
            kind = "ProcessKilled"
            text = f"the process was killed by {signal.Signals(-exitcode).name}{hint}"
        return cls(kind, text, "", text, rank)

    def lines(self) -> Iterator[str]:
        """The few lines that a user reads."""
        where = "" if self.rank is None else f" (rank {self.rank})"
        yield f"{self.kind}: {self.message}{where}" if self.message else f"{self.kind}{where}"
        if self.location:
            yield f"  at {self.location}"
        for note in self.notes:
            yield f"  {note}"


class LaunchError(RuntimeError):
    """A rank failed; `failures` has every rank's own error, the cause in front.

    `is_stopping`: the launcher had received a stop signal before.
    """

    def __init__(self, failures: Sequence[Failure], *, is_stopping: bool = False) -> None:
        self.failures = list(failures)
        self.is_stopping = is_stopping
        super().__init__("\n".join(self.failures[0].lines()))


class OversubscribedError(ValueError):
    """More processes are to be started than this machine has cores or memory for."""

    def __init__(self, what: str) -> None:
        flags = "--oversubscribe, launch.oversubscribe: true or launch(oversubscribe=True)"
        super().__init__(f"{what}; {flags} starts them anyway")


class TrainingFailed(RuntimeError):
    """A training failed, for its `__cause__`, and has left checkpoints to go on from.

    `config` is the config that the run has written, `saved` its last checkpoint and `aside` one
    that is not whole; None where there is none.
    """

    def __init__(self, config: Path, saved: Path | None, aside: Path | None) -> None:
        super().__init__(f"the last checkpoint is {saved or aside}")
        self.config = config
        self.saved = saved
        self.aside = aside


class Terminated(BaseException):
    """A signal such as SIGTERM ended the work at a point where nothing more is saved.

    `saved` is the last checkpoint of the run, or empty.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.saved = saved


class BuildError(RuntimeError):
    """A part could not be built from its section, a key path, for `cause`; `others` neither."""

    def __init__(self, section: str, cause: BaseException) -> None:
        super().__init__(section, cause)
        self.section = section
        self.cause = cause
        self.others: list[BuildError] = []
        text = str(cause).strip()
        for said in (section, section.rpartition(".")[2]):
            text = text.removeprefix(f"{said}: ")
        notes = getattr(cause, "__notes__", [])
        self.what = "; ".join([f"cannot be built: {type(cause).__name__}: {text}", *notes])

    def __str__(self) -> str:
        own = f"{self.section}: {self.what}"
        return "\n".join(dict.fromkeys((own, *map(str, self.others))))


@contextmanager
def as_mistakes_in(config: Config) -> Iterator[None]:
    """Raise what cannot be built as mistakes in `config`, each with its line there."""
    try:
        yield
    except BuildError as error:
        problems = []
        for one in (error, *error.others):
            where = _location_of(one.cause)
            told = f"{one.what}\n  at {where}" if where else one.what
            problems.append(Problem(one.section, told, config.origin(one.section)))
        raise ConfigError(list(dict.fromkeys(problems))) from error.cause


class Attempts:
    """Builds parts that do not depend on each other, and reports all that failed at the end."""

    def __init__(self) -> None:
        self._errors: list[BuildError] = []

    def make(self, section: str, build: Callable[[], T]) -> T | None:
        """Return what `build` makes for a section; None where it raises."""
        try:
            with building(section):
                return build()
        except BuildError as error:
            self._errors += [error, *error.others]
            return None

    def finish(self) -> None:
        """Raise what has gone wrong, all of it in one BuildError."""
        if self._errors:
            first, *others = self._errors
            first.others = others
            raise first


@contextmanager
def building(section: str, options: Iterable[str] = ()) -> Iterator[None]:
    """Add the section of the config to an error, with the key that it concerns.

    That is what `build_tree` noted on it, otherwise the first of `options` that its text names.
    """
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        words = re.findall(r"\w+", str(error))
        key = key_noted_on(error) or next((word for word in words if word in options), "")
        raise BuildError(f"{section}.{key}" if key else section, error) from error


def _location_of(error: BaseException) -> str:
    frame = user_frame(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}"
