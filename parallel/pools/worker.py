"""A worker of a pool: the code of its process, and the format of tasks and results.

To make workers start fast, this module imports only what tasks with plain values need. It does not
import torch.
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

from ...primitives.parent_watch import end_after, end_with_parent
from ...transport import descriptors as _descriptors
from ...transport.wire import INLINE_BYTES, Packed, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Task = tuple[int, int, Callable[..., Any], Any, dict[str, Any]]

# The header of a task: its number at this worker; its job; how many bytes and descriptors of this
# message belong to the map's function; its kind; the slot for the map's function; and one bit for
# each function slot that is still needed. The body of a map's task is the items; if the worker may
# not have the function, it precedes them. The body of a call is the function and its arguments.
TASK = struct.Struct("<QIIBBBB")
FUNCTION_SLOTS = 8
BEGIN, CALL, MAP, STARMAP = range(4)
# The header of a result: the number of its task, and its kind. The value or error follows.
RESULT = struct.Struct("<QB")
VALUE, ERROR, BARE_ERROR, READY, FAILED, DONE = range(6)
# The longest message is a task with a function, both of maximal length.
MESSAGE_BYTES = TASK.size + 2 * INLINE_BYTES

_TEXT_LIMIT = 1000


def map_caller(chunk: tuple[Callable[..., Any], Any]) -> list[Any]:
    """Run one chunk of a map: a function and its items."""
    func, inputs = chunk
    return [func(value) for value in inputs]


def starmap_caller(chunk: tuple[Callable[..., Any], Any]) -> list[Any]:
    """Run one chunk of a starmap: a function and tuples of its arguments."""
    func, inputs = chunk
    return [func(*arguments) for arguments in inputs]


def worker(
    get: Callable[[], Task | None],
    put: Callable[[Any], None],
    initializer: Callable[..., object] | None = None,
    initargs: Any = (),
    maxtasks: int | None = None,
) -> None:
    """Run tasks until ``get`` returns None or ``maxtasks`` are done.

    Args:
        get: returns a task: job, chunk, function, arguments, keyword arguments. In a process with
            the pool's default queues, chunk is the number of the task at this worker.
        put: takes its result: job, chunk, (True, value) or (False, error).
        initializer: called first, with ``initargs``.
        maxtasks: the maximum number of tasks (default: no limit).
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
        # Do not keep these objects alive while waiting for the next task.
        del task, func, args, kwargs, outcome


def _as_error(exit_error: BaseException) -> Exception:
    """Return the error for a task whose exception, such as SystemExit, is not an ``Exception``."""
    from ...transport.errors import RemoteError

    error = RemoteError(type(exit_error).__qualname__, str(exit_error))
    error.__cause__ = exit_error
    return error.with_traceback(exit_error.__traceback__)


class InheritedDescriptor:
    """Passes a file descriptor to a process that is started, with any start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _load_descriptor, (reduction.DupFd(self.fd),)


def _load_descriptor(duplicate: Any) -> InheritedDescriptor:
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
        descriptors: the socket of tasks and results, and the memory for the current task's number.
        parent: the process id of the pool.
        start_method: how this process was started.
        queues: the queues of tasks and results of a pool that overrides ``setup_queues``.
        to_close: in a forked process, other open descriptors of the pool.
        begin: the function to run, the initializer and its arguments, ``maxtasks``,
            ``copy_tensor`` and ``recurse``; None if they come as the first message, because the
            process was not forked.
    """
    # The parent process of a worker may be a fork server, which outlives the pool.
    (end_after if start_method == "forkserver" else end_with_parent)(parent)
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
    end.send(0, READY, Packed(b""))
    if queues is None:
        work(end.get, end.put, None, (), maxtasks)
        return
    with end.reporting():
        work(queues[0].get, _result_putter(queues[1]), None, (), maxtasks)
    end.send(0, DONE, Packed(b""))


def _result_putter(outqueue: Any) -> Callable[[Any], None]:
    """Return a function that puts results into a queue that ``setup_queues`` returned.

    If a result cannot be pickled, the function puts an error instead.
    """
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


class _WorkerEnd:
    """The worker's end of the socket: receives tasks and sends results, one at a time."""

    def __init__(self, link: InheritedDescriptor, memory: InheritedDescriptor) -> None:
        self._link = socket.socket(fileno=link.fd)
        self._link.setblocking(True)
        self._memory = memory.fd
        # `copy_tensor` and `recurse`.
        self.packing = [True, False]
        # The functions of maps by slot, with their jobs.
        self._functions: dict[int, tuple[int, Any]] = {}
        self._number = 0
        self._is_disowned = False

    def disown(self) -> None:
        """Mark this object as a copy in a process that a task has forked."""
        self._is_disowned = True

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send an exception as the failure of the worker, and end the process."""
        try:
            yield
        except BaseException as error:
            self.send_error(0, FAILED, error)
            sys.exit(1)

    def begin(self) -> Any:
        """Return the first message; see ``main``."""
        message, fds = _descriptors.receive(self._link, MESSAGE_BYTES)
        if not message:
            os._exit(1)
        return unpack(memoryview(message)[TASK.size :], fds)

    def get(self) -> Task | None:
        """Return the next task, None at the end; send the error if it cannot be unpickled."""
        while True:
            message, fds = _descriptors.try_receive(self._link, MESSAGE_BYTES)
            if not message:
                return None
            # From now on the task is lost if this process ends.
            self._number = TASK.unpack_from(message)[0]
            os.pwrite(self._memory, self._number.to_bytes(8, "little"), 0)
            try:
                if isinstance(fds, OSError):
                    raise fds
                return self._task(message, fds)
            except BaseException as error:
                self.send_error(self._number, ERROR, error)
            # Do not keep the message alive while waiting for the next task.
            del message

    def _task(self, message: bytes, fds: list[int]) -> Task:
        number, job, size, count, kind, slot, needed = TASK.unpack_from(message)
        if self._functions:
            self._functions = {
                at: sent_function
                for at, sent_function in self._functions.items()
                if needed >> at & 1
            }
        function_fds, fds = fds[:count], fds[count:]
        body = memoryview(message)[TASK.size + size :]
        if size and job != self._functions.get(slot, (None,))[0]:
            self._functions.pop(slot, None)
            try:
                function = unpack(message[TASK.size : TASK.size + size], function_fds)
            except BaseException:
                _descriptors.close(fds)
                raise
            self._functions[slot] = job, function
        else:
            _descriptors.close(function_fds)
        value = unpack(body, fds)
        if kind == CALL:
            return job, number, *value
        caller = map_caller if kind == MAP else starmap_caller
        return job, number, caller, ((self._functions[slot][1], value),), {}

    def put(self, result: tuple[int, int, tuple[bool, Any]]) -> None:
        """Send the result of the current task."""
        if self._is_disowned:
            # In a process that the task has forked: only the worker itself sends a result.
            os._exit(1)
        success, value = result[2]
        if not success:
            self.send_error(self._number, ERROR, value)
            return
        copy_tensor, recurse = self.packing
        try:
            self.send(self._number, VALUE, pack(value, copy_tensor=copy_tensor, recurse=recurse))
        except BaseException as reason:
            self.send_error(self._number, ERROR, _encoding_error(reason, value))

    def send(self, number: int, kind: int, packed: Packed) -> None:
        """Send a result and close ``packed``."""
        with contextlib.closing(packed):
            message = RESULT.pack(number, kind) + packed.data
            _descriptors.send(self._link, message, packed.fds)

    def send_error(self, number: int, kind: int, error: BaseException) -> None:
        """Send an error as the result."""
        try:
            from ...transport.remote_errors import describe

            self.send(number, kind, pack(describe(error), copy_tensor=True))
        # For example, memory or descriptors are exhausted.
        except BaseException:
            texts = type(error).__qualname__, str(error)[:_TEXT_LIMIT]
            self.send(number, BARE_ERROR, Packed(pickle.dumps(texts)))


def _encoding_error(reason: BaseException, value: object) -> Exception:
    from ..errors import EncodingError

    try:
        text = repr(value)
    except BaseException as error:
        text = f"of type {type(value).__qualname__} (its repr failed: {type(error).__name__})"
    text = text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."
    return EncodingError(f"{type(reason).__name__}: {reason}"[:_TEXT_LIMIT], text)


class _Storage(type):
    """Defines ``CtxPoolStorage.storage``, which may differ between threads."""

    _open_process: Any = None
    _of_thread = threading.local()

    @property
    def storage(cls) -> Any:
        return getattr(cls._of_thread, "storage", cls._open_process)

    @storage.setter
    def storage(cls, context: Any) -> None:
        if hasattr(cls._of_thread, "storage"):
            cls._of_thread.storage = context
        else:
            cls._open_process = context

    def enter_thread(cls) -> None:
        """Give this thread a separate context, None at first."""
        cls._of_thread.storage = None


class CtxPoolStorage(metaclass=_Storage):
    """The context of this worker.

    Attributes:
        storage: in a thread of a ``CtxThreadPool``, the thread's context; otherwise, in a worker
            process of a ``CtxPool``, the process's context; None elsewhere.
    """


class WithContext:
    """A function that is called with the worker's context before its own arguments."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(CtxPoolStorage.storage, *args, **kwargs)


def proxy_ctx_caller(
    call: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a function with this worker's context before its own arguments.

    Args:
        call: the function, or its pickle from ``dumps``; or a tuple of all three arguments.
        args: the further arguments; None if ``call`` is a tuple.
        kwargs: the keyword arguments.
    """
    if args is None:
        call, args, kwargs = call
    if isinstance(call, bytes):
        from ...transport.pickling import loads

        call = loads(call)
    return call(CtxPoolStorage.storage, *(args or ()), **(kwargs or {}))


def enter(
    is_thread: bool,
    context: Any,
    initializer: Callable[..., object] | None,
    initargs: Sequence[Any],
) -> None:
    """Store the context of the worker, a process or a thread, then call the initializer."""
    if is_thread:
        CtxPoolStorage.enter_thread()
    CtxPoolStorage.storage = context
    if initializer is not None:
        initializer(*initargs)
