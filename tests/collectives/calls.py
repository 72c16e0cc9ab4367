"""The outcomes of calls as text that can be sent between processes."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from stepwrap.collectives import trace_collectives

T = TypeVar("T")

# The location that errors and traces name for collectives called in this file.
HERE = os.path.relpath(__file__)


def outcome(call: Callable[..., object], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return the type and text of the error that the call raises, or two empty strings."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def outcome_text(call: Callable[..., object], *args: Any) -> str:
    """Return the error as "Type: text", or "no error"."""
    kind, text = outcome(call, *args)
    return f"{kind}: {text}" if kind else "no error"


def assert_outcomes(outcomes: Iterable[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    """Compare the types of errors, and check that each text has the expected part."""
    for (kind, text), (error, phrase) in zip(outcomes, expected, strict=True):
        assert (kind, phrase in text) == (error, True), text


@contextlib.contextmanager
def group_of_one(backend: str | None) -> Iterator[None]:
    """Create a default group of this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def messages_of_collectives() -> Iterator[list[str]]:
    """Collect the log messages of the package."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stepwrap.collectives")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def traced(on: bool, scenario: Callable[..., T], *args: Any) -> T:
    """Call the scenario with tracing switched on or off."""
    trace_collectives(on)
    try:
        return scenario(*args)
    finally:
        trace_collectives(False)
