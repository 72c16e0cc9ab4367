"""What surrounds every communication: who calls, from where, and what to say when it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from ..errors import Call, CollectiveError, Place, users_site
from ..process.ranks import live_world_size
from . import tracing as trace
from .report import failure, withdraw

_thread = threading.local()


class calling(Call):
    """A collective call in progress: `with calling("all_reduce", group, describe): ...`.

    An error of the transport inside becomes a CollectiveError that names ranks, calls and lines.
    While tracing, the ranks first make sure that all of them are in this call. Of nested calls in
    one group the outermost counts: it is the one that the user made.
    """

    def __enter__(self) -> Call:
        outer: calling | None = getattr(_thread, "call", None)
        self._outer = outer
        self._record: trace.CollectiveRecord | None = None
        self._is_inner = outer is not None and outer.group is self.group
        if outer is not None and self._is_inner:
            return outer
        _thread.call = self
        if trace.is_tracing():
            try:
                self._record = trace.enter(self)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_inner:
            return
        _thread.call = self._outer
        if self._record:
            self._record.state = "failed" if error else "finished"
        if error is None:
            withdraw(self.group)
        elif isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise failure(self.here(), self.group, error) from error


class Progress(NamedTuple):
    """What a loop is doing, such as "training", and how far it has come."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@contextmanager
def in_progress(progress: Callable[[], Progress]) -> Iterator[None]:
    """Name the ranks that are missing when the body waits for them in vain; every rank enters.

    For what communicates without `calling`, as torch does in backward passes. While the body
    runs, a thread tells the others where this rank is. Alone, nothing is done.

    Args:
        progress: returns what the body is doing; also called from another thread.

    Raises:
        CollectiveError: in place of the transport's error.
    """
    if live_world_size() == 1:
        yield
        return
    with trace.answering(lambda: str(progress())):
        try:
            yield
        except RuntimeError as error:
            if _is_of_the_transport(error):
                own = Place(dist.get_rank(), *progress())
                raise failure(own, None, error, is_call=False) from error
            raise


def explain_transport(error: BaseException, name: str) -> None:
    """Raise a CollectiveError that names ranks for an error of the transport, else nothing.

    Args:
        name: the function of ours in which it came. A loop that is `in_progress` tells itself.
    """
    if trace.is_in_progress() or not _is_of_the_transport(error) or live_world_size() == 1:
        return
    raise failure(Place(dist.get_rank(), name, users_site()), None, error) from error


def _is_of_the_transport(error: BaseException) -> bool:
    """Return whether NCCL, a store or gloo has raised the error, which for gloo its text tells."""
    if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
