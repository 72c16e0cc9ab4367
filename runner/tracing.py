"""Tracing of collectives for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..collectives import is_tracing, trace_collectives


@contextmanager
def traced(on: bool) -> Iterator[None]:
    """Trace collectives when `on`; else, and afterwards, as it was before. Every rank must enter.

    What the environment has switched on stays on.
    """
    before = is_tracing()
    trace_collectives(on or before)
    try:
        yield
    finally:
        trace_collectives(before)
