"""The errors about configs and names, and the texts of their messages."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
# The models and data sets of the shipped configs count as the user's code.
_PACKAGES = [
    marker.parent for marker in _ROOT.glob("*/py.typed") if marker.parent.name != "configs"
]
_LIBRARIES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_USERS = tuple(f"{path.resolve()}/" for path in (*_PACKAGES, *map(Path, _LIBRARIES)))
# The maximum number of characters of a name or value in a message.
MOST_SHOWN = 80
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True)
class Problem:
    """A problem in a config.

    Attributes:
        key: dotted path of the setting, "" for the file as a whole.
        what: the message, without file and key.
        origin: "file:line" or "override a.b=1", "" if unknown.
        cause: the error from which the problem was found, with its traceback.
    """

    key: str
    what: str
    origin: str = ""
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        fields = (shortened(self.origin, 300), shortened(self.key, 300), self.what)
        return ": ".join(text for text in fields if text)


class ConfigError(Exception):
    """A config cannot be read or is not valid.

    Attributes:
        problems: all problems found.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)
        self.__cause__ = next((problem.cause for problem in self.problems if problem.cause), None)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


@contextmanager
def under_key(key: str) -> Iterator[None]:
    """Store a key path on an error raised in the block: ``key``, then the keys of inner blocks."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # Set an attribute, because build_tree promises to keep the types of errors.
        note: Any = error
        note.config_key = ".".join(filter(None, (key, key_noted_on(error))))
        raise


def key_noted_on(error: BaseException) -> str:
    """Return the path that ``under_key`` stored on an error, "" if it has none."""
    return str(getattr(error, "config_key", ""))


class RegistryKeyError(KeyError):
    """A KeyError that prints its text; KeyError itself prints the text's repr."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def shown_value(value: object) -> str:
    """Return a setting for messages: null and true as in YAML, long values shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shortened(repr(value))


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text cut to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def describe(error: BaseException) -> str:
    """Return "TypeError: text" on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_at(error: BaseException) -> str:
    """Return "TypeError: text (my_file.py:3)" on one line, with the user's file and line."""
    frame = user_frame(error)
    text = describe(error)
    if frame is None:
        return text
    if isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg}"
    return f"{text} ({shown(frame.filename)}:{frame.lineno})"


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path for messages: relative if it is under the working directory."""
    absolute = Path(os.path.abspath(path))
    cwd = Path.cwd()
    return str(absolute.relative_to(cwd) if absolute.is_relative_to(cwd) else absolute)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame in the user's files that led to ``error``."""
    for frame in (frame for cause in causes(error) for frame in reversed(_frames(cause))):
        if is_users_file(frame.filename):
            return frame
    return None


def is_users_file(name: str) -> bool:
    """Return whether a source file is the user's, neither a part of this package nor installed."""
    path = Path(name).resolve()
    # Packages of another environment may be on the path too.
    is_installed = "site-packages" in path.parts or str(path).startswith(_NOT_USERS)
    return not name.startswith("<") and not is_installed


def _frames(error: BaseException) -> traceback.StackSummary:
    """Return the frames of an error, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        location = (error.filename or "<unknown>", error.lineno or 0, "<module>")
        frames.append(traceback.FrameSummary(*location))
    # The text of a data-loading worker's error contains its traceback.
    for file, line, name in _FRAME.findall(str(error)):
        frames.append(traceback.FrameSummary(file, int(line), name))
    return frames


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes, most recent first."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        # Exceptions of users may be falsy, such as those that are sequences.
        following = None if current.__suppress_context__ else current.__context__
        current = following if current.__cause__ is None else current.__cause__
