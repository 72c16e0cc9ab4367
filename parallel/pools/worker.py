"""A worker of a pool: the code of its process, and the format of tasks and results.

Imports neither torch nor anything else that a task of plain values does not need: each start of a
worker would pay for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction

from ...transport import descriptors as _descriptors
from ...transport.wire import INLINE_BYTES, pack, release, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Task = tuple[int, int, Callable[..., Any], Any, dict[str, Any]]

# A task: its number at this worker, its job, the bytes and descriptors of its function, its kind,
# the place of a map's function, and which places, as bits, are still needed. The function follows,
# unless it is there already, then the items of a map, or the function and arguments of a call.
TASK = struct.Struct("<QIIBBBB")
PLACES = 8
BEGIN, CALL, MAP, STARMAP = range(4)
# A result: the number of its task, and its kind; the value or the error follows.
RESULT = struct.Struct("<QB")
VALUE, ERROR, BARE_ERROR, READY, FAILED = range(5)
# The longest message: a task with a function, both at their longest.
MESSAGE_BYTES = TASK.size + 2 * INLINE_BYTES

_PR_SET_PDEATHSIG = 1
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
    from ...transport.errors import RemoteError

    error = RemoteError(type(ending).__qualname__, str(ending)).with_traceback(ending.__traceback__)
    error.__cause__ = ending
    return error


class InheritedDescriptor:
    """A descriptor that a process is given at its start, whichever way it is started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _adopted, (reduction.DupFd(self.fd),)


def _adopted(duplicate: Any) -> InheritedDescriptor:
    fd: int = duplicate.detach()
    os.set_inheritable(fd, False)
    return InheritedDescriptor(fd)


def main(
    descriptors: Sequence[InheritedDescriptor],
    parent: int,
    start_method: str,
    queues: tuple[Any, Any] | None,
    to_close: Sequence[int],
    begin: tuple[Any, ...] | None,
) -> None:
    """Run a worker's process.

    Args:
        descriptors: the socket of tasks and results, and the memory for the task begun last.
        queues: of a pool that has its own: of tasks and of results.
        to_close: in a forked process, other open descriptors of the pool.
        begin: in a forked process, the first message of other processes: the function to run,
            initializer and its arguments, tasks until the end, `copy_tensor`, `recurse`.
    """
    _end_with_the_pool(parent, start_method)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _descriptors.close(to_close)
    if start_method == "fork":
        from ..processes import use_one_thread

        use_one_thread()
    end = _WorkerEnd(*descriptors)
    os.register_at_fork(after_in_child=end.disown)
    with end.reporting():
        work, initializer, initargs, maxtasks, *end.packing = begin or end.begin()
        if initializer is not None:
            initializer(*initargs)
    end.send(0, READY)
    if queues is None:
        work(end.get, end.put, None, (), maxtasks)
        return
    with end.reporting():
        work(queues[0].get, _putting(queues[1]), None, (), maxtasks)


def _putting(outqueue: Any) -> Callable[[Any], None]:
    """Return what puts results, and errors in their place, into a queue of a pool's own."""
    from ...transport.remote_errors import ExceptionWithTraceback

    def put(result: tuple[int, int, tuple[bool, Any]]) -> None:
        job, chunk, (success, value) = result
        if not success:
            value = ExceptionWithTraceback(value)
        try:
            outqueue.put((job, chunk, (success, value)))
        except Exception as error:
            unsent = ExceptionWithTraceback(_encoding_error(error, value))
            outqueue.put((job, chunk, (False, unsent)))

    return put


def _end_with_the_pool(parent: int, start_method: str) -> None:
    if start_method == "forkserver":
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before the system was asked to tell.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    import select

    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    select.select([fd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


class _WorkerEnd:
    """The worker's end of the socket: takes tasks and gives results, one at a time."""

    def __init__(self, link: InheritedDescriptor, memory: InheritedDescriptor) -> None:
        self._link = socket.socket(fileno=link.fd)
        self._link.setblocking(True)
        self._memory = memory.fd
        # Whether tensors are copied, and `recurse`.
        self.packing = [True, False]
        # The functions of maps by their places, with their jobs.
        self._functions: dict[int, tuple[int, Any]] = {}
        self._number = 0
        self._is_disowned = False

    def disown(self) -> None:
        self._is_disowned = True

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send what is raised as the failure of the worker, and end it."""
        try:
            yield
        except BaseException as error:
            self.send_error(0, FAILED, error)
            sys.exit(1)

    def begin(self) -> Any:
        """Return what the worker runs, the function that it begins with, and its arguments."""
        message, fds = _descriptors.receive(self._link, MESSAGE_BYTES)
        if not message:
            os._exit(1)
        return unpack(memoryview(message)[TASK.size :], fds)

    def get(self) -> Task | None:
        """Return the next task that could be made from its pickle, None at the end."""
        while True:
            message, fds = _descriptors.try_receive(self._link, MESSAGE_BYTES)
            if not message:
                return None
            # From here on the task is lost if this process ends.
            self._number = TASK.unpack_from(message)[0]
            os.pwrite(self._memory, self._number.to_bytes(8, "little"), 0)
            try:
                if isinstance(fds, OSError):
                    raise fds
                return self._task(message, fds)
            except BaseException as error:
                self.send_error(self._number, ERROR, error)
            # Not kept while waiting for the next one.
            del message

    def _task(self, message: bytes, fds: list[int]) -> Task:
        number, job, size, count, kind, place, needed = TASK.unpack_from(message)
        for other in [one for one in self._functions if not needed >> one & 1]:
            del self._functions[other]
        function_fds, fds = fds[:count], fds[count:]
        body = memoryview(message)[TASK.size + size :]
        if size and job != self._functions.get(place, (None,))[0]:
            self._functions.pop(place, None)
            try:
                function = unpack(message[TASK.size : TASK.size + size], function_fds)
            except BaseException:
                _descriptors.close(fds)
                raise
            self._functions[place] = job, function
        else:
            _descriptors.close(function_fds)
        value = unpack(body, fds)
        if kind == CALL:
            return job, number, *value
        caller = map_caller if kind == MAP else starmap_caller
        return job, number, caller, ((self._functions[place][1], value),), {}

    def put(self, result: tuple[int, int, tuple[bool, Any]]) -> None:
        """Send the result of the task that was taken last."""
        if self._is_disowned:
            # It has come out of the task as well, which the worker itself answers.
            os._exit(1)
        success, value = result[2]
        if not success:
            self.send_error(self._number, ERROR, value)
            return
        copy_tensor, recurse = self.packing
        try:
            packed = pack(value, copy_tensor=copy_tensor, recurse=recurse)
            try:
                self.send(self._number, VALUE, packed.data, packed.fds)
            finally:
                release(packed)
        except BaseException as reason:
            self.send_error(self._number, ERROR, _encoding_error(reason, value))

    def send(self, number: int, kind: int, data: bytes = b"", fds: Sequence[int] = ()) -> None:
        message = RESULT.pack(number, kind) + data
        if fds:
            _descriptors.send(self._link, message, fds)
        else:
            self._link.send(message)

    def send_error(self, number: int, kind: int, error: BaseException) -> None:
        """Send an error as the result."""
        try:
            from ...transport.remote_errors import describe

            packed = pack(describe(error), copy_tensor=True)
            try:
                self.send(number, kind, packed.data, packed.fds)
            finally:
                release(packed)
        # There may be too little memory for it, or no descriptor.
        except BaseException:
            texts = type(error).__qualname__, str(error)[:_TEXT_LIMIT]
            self.send(number, BARE_ERROR, pickle.dumps(texts))


def _encoding_error(reason: BaseException, value: object) -> Exception:
    from ..errors import EncodingError

    try:
        text = repr(value)
    except BaseException as error:
        text = f"of type {type(value).__qualname__} (its repr failed: {type(error).__name__})"
    text = text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."
    return EncodingError(f"{type(reason).__name__}: {reason}"[:_TEXT_LIMIT], text)


class CtxPoolStorage:
    """Holds the context of this worker process.

    Attributes:
        storage: the context; None in a process that is no worker of a `CtxPool`.
    """

    storage: Any = None


class WithContext:
    """A function that is called with the worker's context before its own arguments."""

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
        from ...transport.pickling import loads

        call = loads(call)
    return call(CtxPoolStorage.storage, *(args or ()), **(kwargs or {}))


def enter(
    holder: Any, context: Any, initializer: Callable[..., object] | None, initargs: Sequence[Any]
) -> None:
    """Begin as a worker with a context, which `WithContext` finds in the holder."""
    holder.storage = context
    if initializer is not None:
        initializer(*initargs)
