"""What went wrong in a run, told in a few lines and able to cross process borders."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..registry import causes, user_frame

# What torch puts above the traceback of a data-loading worker.
_OF_WORKER = "Original Traceback (most recent call last)"


@dataclass(frozen=True)
class Failure:
    """One rank's error.

    Attributes:
        location: the user's innermost "file:line in function", or empty.
        notes: what was noted on it: which part of the model, which batch.
    """

    kind: str
    message: str
    location: str
    trace: str
    rank: int | None = None
    time: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """Describe `error`, with the place in the user's own files that led to it."""
        trace = "".join(traceback.format_exception(error))
        location, notes = location_of(error), _notes(error)
        return cls(type(error).__name__, _message(error), location, trace, rank, notes=notes)

    @classmethod
    def of_end(cls, exitcode: int | None, rank: int) -> Failure:
        """Describe the end of a process that has told of no error.

        Its exit code may be unknown, None; -n stands for its end by signal n.
        """
        if exitcode is not None and exitcode < 0:
            hint = ": is the machine out of memory?" if exitcode == -signal.SIGKILL else ""
            text = f"the process was killed by {signal.Signals(-exitcode).name}{hint}"
            return cls("ProcessKilled", text, "", text, rank)
        how = "ended" if exitcode is None else f"exited with code {exitcode}"
        text = f"the process {how} before its work was done"
        return cls("ProcessEnded", text, "", text, rank)

    def lines(self) -> Iterator[str]:
        """The few lines that a user reads."""
        where = "" if self.rank is None else f" (rank {self.rank})"
        yield f"{self.kind}: {self.message}{where}" if self.message else f"{self.kind}{where}"
        if self.location:
            yield f"  at {self.location}"
        for note in self.notes:
            yield f"  {note}"


class LaunchError(RuntimeError):
    """A rank failed; `failures` has every rank's own error, the cause in front."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        super().__init__("\n".join(self.failures[0].lines()))


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


def location_of(error: BaseException) -> str:
    """Return the user's innermost "file:line in function" that led to `error`, or ""."""
    frame = user_frame(error)
    return "" if frame is None else f"{frame.file}:{frame.line} in {frame.function}"


def _message(error: BaseException) -> str:
    text = str(error).strip()
    if _OF_WORKER not in text:
        return text
    told = _last_lines(text)[0].removeprefix(f"{type(error).__name__}: ")
    return f"{told} ({text.splitlines()[0].strip().rstrip('.')})"


def _notes(error: BaseException) -> list[str]:
    of_worker = _last_lines(str(error))[1:] if _OF_WORKER in str(error) else []
    return [*of_worker, *(note for one in causes(error) for note in getattr(one, "__notes__", []))]


def _last_lines(text: str) -> list[str]:
    """The lines of a printed error that follow its traceback, in which all are indented."""
    lines = text.strip().splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith((" ", "Original Traceback")))
    return lines[last + 1 :] or lines[-1:]
