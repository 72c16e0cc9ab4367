"""Errors of building the parts of a run, with the sections of the config that they came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...registry import Config, ConfigError, Problem
from ..failure import location_of

T = TypeVar("T")


class BuildError(RuntimeError):
    """A part of a run could not be built from its section of the config.

    Attributes:
        section: The key path of that section.
        cause: What its constructor raised.
        others: What else could not be built.
    """

    def __init__(self, section: str, cause: BaseException) -> None:
        super().__init__(section, cause)
        self.section = section
        self.cause = cause
        self.others: list[BuildError] = []

    def __str__(self) -> str:
        own = f"{self.section}: {self._what()}"
        return "\n".join(dict.fromkeys((own, *map(str, self.others))))

    def as_config_error(self, config: Config) -> ConfigError:
        """Return it and the others as mistakes in `config`, each with its line there."""
        problems = [
            Problem(one.section, one._told(), config.origin(one.section))
            for one in (self, *self.others)
        ]
        return ConfigError(list(dict.fromkeys(problems)))

    def _what(self) -> str:
        text = str(self.cause).strip()
        for said in (self.section, self.section.rpartition(".")[2]):
            text = text.removeprefix(f"{said}: ")
        return f"cannot be built: {type(self.cause).__name__}: {text}"

    def _told(self) -> str:
        where = location_of(self.cause)
        return f"{self._what()}\n  at {where}" if where else self._what()


class Attempts:
    """Builds parts that do not need each other, to tell at the end which ones could not be."""

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
    """Say which section of the config an error came from.

    Args:
        options: Names of settings in it: the one that the error names first is to blame.
    """
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except (Exception, SystemExit) as error:
        words = re.findall(r"\w+", str(error))
        blamed = next((word for word in words if word in options), None)
        raise BuildError(f"{section}.{blamed}" if blamed else section, error) from error
