"""What surrounds every communication: who calls, from where, and what to say when it fails."""

from __future__ import annotations

import threading
from types import TracebackType

from . import trace
from ._report import failure, withdraw
from ._story import Call
from .errors import CollectiveError

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
            raise failure(self, error) from error
