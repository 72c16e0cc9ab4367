"""What went wrong in a run, told in a few lines and able to cross process borders."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..registry import user_frame


@dataclass(frozen=True)
class Failure:
    """One rank's error. `location` is the user's innermost "file:line in function", or empty."""

    kind: str
    message: str
    location: str
    trace: str
    rank: int | None = None
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Failure:
        """Describe `error`, with the place in the user's own files that led to it."""
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, _message(error), location_of(error), trace, rank)

    @classmethod
    def read(cls, path: Path) -> Failure:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    def lines(self) -> Iterator[str]:
        """The few lines that a user reads."""
        where = "" if self.rank is None else f" (rank {self.rank})"
        yield f"{self.kind}: {self.message}{where}" if self.message else f"{self.kind}{where}"
        if self.location:
            yield f"  at {self.location}"


class LaunchError(RuntimeError):
    """A rank failed; `failures` has every rank's own error, the cause in front."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        super().__init__("\n".join(self.failures[0].lines()))


class TrainingFailed(RuntimeError):
    """A training failed, for its `__cause__`, and has left checkpoints to go on from.

    `config` is the config that the run has written, `saved` its last checkpoint.
    """

    def __init__(self, config: Path, saved: Path) -> None:
        super().__init__(f"the last checkpoint is {saved}")
        self.config = config
        self.saved = saved


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
    if "Original Traceback (most recent call last)" not in text:
        return text
    first, *_, last = text.splitlines()
    told = last.strip().removeprefix(f"{type(error).__name__}: ")
    return f"{told} ({first.strip().rstrip('.')})"
