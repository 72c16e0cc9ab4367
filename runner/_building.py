"""Errors of building a part of a run, with the section of the config that they came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..registry import Config, ConfigError, Problem


class BuildError(RuntimeError):
    """A part of a run could not be built from its section of the config.

    Attributes:
        section: The key path of that section.
        cause: What its constructor raised.
    """

    def __init__(self, section: str, cause: Exception, told: str = "") -> None:
        told = told or f"{section}: cannot be built: {type(cause).__name__}: {cause}"
        super().__init__(told)
        self.section = section
        self.cause = cause

    def as_problem(self, config: Config) -> Problem:
        """Return it as a mistake in `config`, with the line that set the section."""
        what = f"cannot be built: {type(self.cause).__name__}: {self.cause}"
        return Problem(self.section, what, config.origin(self.section))


@contextmanager
def building(section: str) -> Iterator[None]:
    """Say which section of the config an error came from."""
    try:
        yield
    except (BuildError, ConfigError):
        raise
    except Exception as error:
        raise BuildError(section, error) from error
