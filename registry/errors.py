"""What is said about a wrong name or a wrong setting."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    Attributes:
        key: dotted path of the setting, "" for the file as a whole.
        what: the sentence for the user, without file and key.
        origin: "file:line" or "override a.b=1", "" where unknown.
    """

    key: str
    what: str
    origin: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.what) if part)


class ConfigError(Exception):
    """A config that cannot be read or does not describe a run; holds every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RegistryKeyError(KeyError):
    """A KeyError whose text is printed as it is (KeyError itself prints the repr of it)."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def nearest(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Candidates that a user who wrote `name` may have meant, best first."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, by_lower, n=limit, cutoff=0.6)
    if len(wanted) >= 3:
        containing = sorted((low for low in by_lower if wanted in low), key=len)
        close += [low for low in containing if low not in close]
    return [by_lower[low] for low in close[:limit]]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean A or B?", or "" when nothing is near."""
    close = nearest(name, candidates)
    return f"; did you mean {one_of(close)}?" if close else ""


def one_of(names: Sequence[str]) -> str:
    """Join names as "A, B or C"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def shown_value(value: object) -> str:
    """Return a setting as messages show it: null and true as in YAML, not too long."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shortened(repr(value))


def shortened(text: str) -> str:
    """Return a text of at most 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe(error: BaseException) -> str:
    """Return "TypeError: text" on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
