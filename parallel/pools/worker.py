"""A worker of a pool: what runs in its process.

Nothing here imports torch, or anything else that a task of plain values does not need: that would
be paid at each start of a worker.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..start_methods import use_one_thread
from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Task = tuple[int, int, Callable[..., Any], Any, dict[str, Any]]


_PR_SET_PDEATHSIG = 1
_PLAIN = {type(None), bool, int, float, str, bytes}
# Lists that are quickly seen to be of such.
_SHORT = 256
# What is longer is better in memory that the pool maps.
_INLINE_BYTES = 32768
_TEXT_LIMIT = 1000


def map_caller(chunk: tuple[Callable[..., Any], Any]) -> list[Any]:
    """Run one chunk of a map: a function and its items."""
    func, items = chunk
    return [func(item) for item in items]


def starmap_caller(chunk: tuple[Callable[..., Any], Any]) -> list[Any]:
    """Run one chunk of a starmap: a function and tuples of its arguments."""
    func, items = chunk
    return [func(*item) for item in items]


def worker(
    get: Callable[[], Task | None],
    put: Callable[[Any], None],
    initializer: Callable[..., object] | None = None,
    initargs: Any = (),
    maxtasks: int | None = None,
) -> None:
    """Run tasks until there is None, or `maxtasks` are done.

    Args:
        get: returns a task: job, chunk, function, arguments, keyword arguments.
        put: takes its result: job, chunk, (True, value) or (False, error).
        initializer: is called first, with `initargs`.
    """
    if initializer is not None:
        initializer(*initargs)
    done = 0
    while maxtasks is None or done < maxtasks:
        task = get()
        if task is None:
            break
        job, chunk, func, args, kwargs = task
        try:
            outcome = (True, func(*args, **kwargs))
        except Exception as error:
            outcome = (False, error)
        except BaseException as error:
            outcome = (False, _as_error(error))
        put((job, chunk, outcome))
        done += 1
        # Not kept while waiting for the next one.
        del task, func, args, kwargs, outcome


def _as_error(ending: BaseException) -> Exception:
    """Return what the caller gets for a SystemExit or KeyboardInterrupt, meant for the task."""
    from ..errors import RemoteError

    error = RemoteError(type(ending).__qualname__, str(ending)).with_traceback(ending.__traceback__)
    error.__cause__ = ending
    return error


class Settings:
    """What a worker's process is told at its start.

    Args:
        tasks: the pipe it reads.
        results: the pipe it writes.
        beside: the socket.
        counters: the shared memory of all workers of the pool.
        slot: its place in the pool.
        work: the pool's `worker`.
        maxtasks: tasks until it ends.
    """

    def __init__(
        self,
        tasks: int,
        results: int,
        beside: int,
        counters: int,
        *,
        slot: int,
        work: Callable[..., None],
        maxtasks: int | None,
    ) -> None:
        fds = (tasks, results, beside, counters)
        self.descriptors = [protocol.InheritedDescriptor(fd) for fd in fds]
        self.slot = slot
        self.work = work
        self.maxtasks = maxtasks
        self.start_method = "spawn"
        self.parent = os.getpid()
        self.is_timed = False
        self.copy_tensor = True
        self.recurse = False
        # Only a forked process has them: what else of the pool is open in it.
        self.to_close: list[int] = []
        # A forked worker takes them as they are, others get them through the pipe.
        self.initializer: tuple[Callable[..., object] | None, Any] | None = None


def main(settings: Settings) -> None:
    """Run a worker's process."""
    _end_with_the_pool(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    protocol.close_all(settings.to_close)
    if settings.start_method == "fork":
        use_one_thread()
    end = _WorkerEnd(settings)
    os.register_at_fork(after_in_child=end.disown)
    try:
        initializer, initargs = end.initializer(settings)
        if initializer is not None:
            initializer(*initargs)
    except BaseException as error:
        end.send_error(0, protocol.NOT_STARTED, error)
        sys.exit(1)
    end.send(0, protocol.READY)
    settings.work(end.get, end.put, None, (), settings.maxtasks)


def _end_with_the_pool(settings: Settings) -> None:
    if settings.start_method == "forkserver":
        threading.Thread(target=_watch, args=(settings.parent,), daemon=True).start()
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before the system was asked to tell.
    if os.getppid() != settings.parent:
        os._exit(1)


def _watch(parent: int) -> None:
    import select

    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class _WorkerEnd:
    """The worker's end of the channel: takes tasks and gives results, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._tasks, self._results, beside, counters = (one.fd for one in settings.descriptors)
        self._beside = socket.socket(fileno=beside)
        self._counters = mmap.mmap(counters, 0)
        os.close(counters)
        self._place = settings.slot * protocol.COUNTER.size
        self._is_timed = settings.is_timed
        self._copy_tensor = settings.copy_tensor
        self._recurse = settings.recurse
        self._functions: dict[int, Callable[..., Any]] = {}
        self._number = 0
        self._is_disowned = False

    def disown(self) -> None:
        """Take note that this is no worker, but a process that a task has forked."""
        self._is_disowned = True

    def initializer(self, settings: Settings) -> tuple[Callable[..., object] | None, Any]:
        """Return the function that the worker begins with, and its arguments."""
        if settings.initializer is not None:
            return settings.initializer
        packet = os.read(self._tasks, protocol.PACKET_BYTES)
        if not packet:
            os._exit(1)
        _, _, _, _, flags = protocol.TASK.unpack_from(packet)
        pair: tuple[Callable[..., object] | None, Any] = self._body(packet, 0, flags, 0)
        return pair

    def get(self) -> Task | None:
        """Return the next task that could be made from its pickle, None at the end."""
        while True:
            packet = os.read(self._tasks, protocol.PACKET_BYTES)
            if not packet:
                return None
            number, job, size, kind, flags = protocol.TASK.unpack_from(packet)
            if kind == protocol.STOP:
                return None
            if kind == protocol.FORGET:
                self._functions.pop(job, None)
                continue
            # From here on the task is lost if this process ends.
            if self._is_timed:
                # First: who finds the number already there takes the time to be its own.
                since = self._place + protocol.NUMBER.size
                protocol.SINCE.pack_into(self._counters, since, time.monotonic())
            protocol.NUMBER.pack_into(self._counters, self._place, number)
            self._number = number
            func: Any = None
            body: Any = None
            try:
                func = self._function(packet, job, size, flags)
                body = self._body(packet, size, flags, number)
                if kind == protocol.CALL_PLAIN:
                    return job, number, func, body, {}
                if kind == protocol.CALL:
                    return job, number, func, *body
                caller = map_caller if kind == protocol.MAP else starmap_caller
                return job, number, caller, ((func, body),), {}
            except BaseException as error:
                self.send_error(number, protocol.ERROR, error)
            # Not kept while waiting for the next one.
            del packet
            func = body = None

    def put(self, result: tuple[int, int, tuple[bool, Any]]) -> None:
        """Send the result of the task that was taken last."""
        if self._is_disowned:
            # It has come out of the task as well, which the worker itself answers.
            os._exit(1)
        _, _, (success, value) = result
        if not success:
            self.send_error(self._number, protocol.ERROR, value)
            return
        try:
            data, is_beside = self._encoded(value)
        except BaseException as reason:
            texts = f"{type(reason).__name__}: {reason}"[:_TEXT_LIMIT], _short_repr(value)
            self.send(self._number, protocol.NOT_ENCODED, pickle.dumps(texts))
        else:
            self.send(self._number, protocol.VALUE, data, beside=is_beside)

    def send(self, number: int, kind: int, data: bytes = b"", *, beside: bool = False) -> None:
        """Write one result."""
        left = protocol.RESULT.pack(number, len(data), kind, beside) + data
        while left:
            left = left[os.write(self._results, left) :]

    def send_error(self, number: int, kind: int, error: BaseException) -> None:
        """Write an error as the result."""
        try:
            from ..transport.remote_errors import describe

            data = describe(error)
        # There may be too little memory for it.
        except BaseException:
            texts = type(error).__qualname__, str(error)[:_TEXT_LIMIT]
            self.send(number, protocol.BARE_ERROR, pickle.dumps(texts))
            return
        self.send(number, kind, data)

    def _function(self, packet: bytes, job: int, size: int, flags: int) -> Callable[..., Any]:
        # It may come again with tasks that were sent before this one was answered.
        if job in self._functions:
            return self._functions[job]
        if flags & protocol.FUNCTION_BESIDE:
            func = self._from_beside(self._number)
        else:
            func = _decoded(packet[protocol.TASK.size : protocol.TASK.size + size], ())
        if flags & protocol.STORE:
            self._functions[job] = func
        made: Callable[..., Any] = func
        return made

    def _body(self, packet: bytes, size: int, flags: int, number: int) -> Any:
        if flags & protocol.BODY_BESIDE:
            return self._from_beside(number)
        return _decoded(memoryview(packet)[protocol.TASK.size + size :], ())

    def _from_beside(self, number: int) -> Any:
        return _decoded(*protocol.receive_beside(self._beside, number))

    def _encoded(self, value: Any) -> tuple[bytes, bool]:
        """Return a value as bytes, and whether descriptors belong to it, which are sent."""
        kind = type(value)
        is_short = kind is list and len(value) <= _SHORT
        if kind in _PLAIN or (is_short and _PLAIN.issuperset(map(type, value))):
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if len(data) <= _INLINE_BYTES:
                return data, False
        from ..transport.wire import pack, release

        packed = pack(value, copy_tensor=self._copy_tensor, recurse=self._recurse)
        if not packed.fds:
            return packed.data, False
        try:
            protocol.send_beside(self._beside, self._number, b"-", packed.fds)
        finally:
            release(packed)
        return packed.data, True


def _decoded(data: Any, fds: Any) -> Any:
    if not fds and data[0] == protocol.PICKLE:
        return pickle.loads(data)
    from ..transport.wire import unpack

    return unpack(data, fds)


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except BaseException as error:
        text = f"of type {type(value).__qualname__} (its repr failed: {type(error).__name__})"
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."


class CtxPoolStorage:
    """Holds the context of this worker process.

    Attributes:
        storage: the context; None in a process that is no worker of a `CtxPool`.
    """

    storage: Any = None


class WithContext:
    """A function that is called with the worker's context before its own arguments.

    Args:
        func: the function.
        holder: has the context as its `storage`, in each process or in each thread.
    """

    def __init__(self, func: Callable[..., Any], holder: Any = CtxPoolStorage) -> None:
        self.func = func
        self._holder = holder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(self._holder.storage, *args, **kwargs)


def proxy_ctx_caller(
    call: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run a function with this worker's context before its own arguments.

    Args:
        call: the function, or its `pickling.dumps`; alone, the triple of it, args and kwargs.
        args: its further arguments.
        kwargs: its keyword arguments.
    """
    if args is None:
        call, args, kwargs = call
    if isinstance(call, bytes):
        from ..transport.pickling import loads

        call = loads(call)
    return call(CtxPoolStorage.storage, *(args or ()), **(kwargs or {}))


def enter(
    holder: Any,
    context: Any,
    initializer: Callable[..., object] | None,
    initargs: Sequence[Any],
) -> None:
    """Begin as a worker with a context, which `WithContext` finds in the holder."""
    holder.storage = context
    if initializer is not None:
        initializer(*initargs)
