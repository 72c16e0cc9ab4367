"""A worker of a pool: what runs in its process, and how it talks with the pool.

Tasks go through a pipe in packet mode: one read takes one task, whole or not at all. The pool keeps
a reading end too, so that it can take back, exactly, what its worker has not taken. What is too
large for a packet, and descriptors, travel beside it through a socket, under the task's number;
the reader drops what belongs to tasks that were taken back. Results come through a pipe of bytes.

Nothing here imports torch, or anything else that a task of plain values does not need: that would
be paid at each start of a worker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction

from ..transport import descriptors as _descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Task = tuple[int, int, Callable[..., Any], Any, dict[str, Any]]

# A task: its number at this worker, job, bytes of its function that follow, kind, flags. A call
# has arguments and keyword arguments, a plain call arguments alone.
TASK = struct.Struct("<QIHBB")
CALL, CALL_PLAIN, MAP, STARMAP, FORGET, STOP, BEGIN = range(7)
FUNCTION_BESIDE, BODY_BESIDE = 1, 2
# What one write to a pipe keeps together.
PACKET_BYTES = 4096
# A result: the number of its task, bytes that follow, kind, whether descriptors lie in the socket.
RESULT = struct.Struct("<QIBB")
VALUE, ERROR, BARE_ERROR, READY, FAILED, FORGOTTEN = range(6)
# In shared memory per worker: the task it has begun; before what lies beside a packet: its task; in
# a command to forget: jobs.
NUMBER = struct.Struct("<Q")
# How a pickle begins; what begins otherwise only `wire.unpack` can read.
PICKLE = 0x80

_MESSAGE_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1
# What the C pickler takes without any of our reducers.
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
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


def receive_beside(beside: socket.socket, number: int) -> tuple[bytes, list[int]]:
    """Return what was sent under a number, and drop what was sent under others before."""
    while True:
        part, fds = _descriptors.receive(beside, _MESSAGE_BYTES)
        if not part:
            raise EOFError("the other side of the pool is gone")
        if NUMBER.unpack_from(part) == (number,):
            return part[NUMBER.size :], fds
        _descriptors.close(fds)


def main(
    descriptors: Sequence[InheritedDescriptor],
    slot: int,
    parent: int,
    start_method: str,
    queues: tuple[Any, Any] | None,
    to_close: Sequence[int],
    begin: tuple[Any, ...] | None,
) -> None:
    """Run a worker's process.

    Args:
        descriptors: the pipes of tasks and of results, the socket, the memory that all share.
        queues: of a pool that has its own: of tasks and of results.
        to_close: in a forked process, what else of the pool is open.
        begin: in a forked process, what others get through the pipe: what it runs, initializer and
            its arguments, tasks until it ends, whether tensors are copied, `recurse`.
    """
    _end_with_the_pool(parent, start_method)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _descriptors.close(to_close)
    if start_method == "fork":
        from ..processes import use_one_thread

        use_one_thread()
    end = _WorkerEnd(descriptors, slot)
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
    from ..transport.remote_errors import ExceptionWithTraceback

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
    """The worker's end of the pipes: takes tasks and gives results, one at a time."""

    def __init__(self, descriptors: Sequence[InheritedDescriptor], slot: int) -> None:
        self._tasks, self._results, beside, counters = (one.fd for one in descriptors)
        self._beside = socket.socket(fileno=beside)
        self._counters = mmap.mmap(counters, 0)
        os.close(counters)
        self._place = slot * NUMBER.size
        # Whether tensors are copied, and `recurse`.
        self.packing = [True, False]
        self._functions: dict[int, Callable[..., Any]] = {}
        self._number = 0
        self._is_disowned = False

    def disown(self) -> None:
        self._is_disowned = True

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Write what is raised as the failure of the worker, and end it."""
        try:
            yield
        except BaseException as error:
            self.send_error(0, FAILED, error)
            sys.exit(1)

    def begin(self) -> Any:
        """Return what the worker runs, the function that it begins with, and its arguments."""
        if not os.read(self._tasks, PACKET_BYTES):
            os._exit(1)
        return self._from_beside(0)

    def get(self) -> Task | None:
        """Return the next task that could be made from its pickle, None at the end."""
        while True:
            packet = os.read(self._tasks, PACKET_BYTES)
            if not packet:
                return None
            number, job, size, kind, flags = TASK.unpack_from(packet)
            if kind == STOP:
                return None
            if kind == FORGET:
                for (forgotten,) in NUMBER.iter_unpack(packet[TASK.size : TASK.size + size]):
                    self._functions.pop(forgotten, None)
                self.send(0, FORGOTTEN)
                continue
            # From here on the task is lost if this process ends.
            NUMBER.pack_into(self._counters, self._place, number)
            self._number = number
            try:
                return self._task(packet, job, size, kind, flags)
            except BaseException as error:
                self.send_error(number, ERROR, error)
            # Not kept while waiting for the next one.
            del packet

    def _task(self, packet: bytes, job: int, size: int, kind: int, flags: int) -> Task:
        number = self._number
        # It may come again with tasks that were sent before the first was answered.
        func = self._functions.get(job)
        if func is None:
            if flags & FUNCTION_BESIDE:
                func = self._from_beside(number)
            else:
                func = _decoded(packet[TASK.size : TASK.size + size], ())
            if kind in (MAP, STARMAP):
                self._functions[job] = func
        if flags & BODY_BESIDE:
            body = self._from_beside(number)
        else:
            body = _decoded(memoryview(packet)[TASK.size + size :], ())
        if kind == CALL_PLAIN:
            return job, number, func, body, {}
        if kind == CALL:
            return job, number, func, *body
        return job, number, map_caller if kind == MAP else starmap_caller, ((func, body),), {}

    def put(self, result: tuple[int, int, tuple[bool, Any]]) -> None:
        """Send the result of the task that was taken last."""
        if self._is_disowned:
            # It has come out of the task as well, which the worker itself answers.
            os._exit(1)
        success, value = result[2]
        if not success:
            self.send_error(self._number, ERROR, value)
            return
        try:
            data, is_beside = self._encoded(value)
        except BaseException as reason:
            self.send_error(self._number, ERROR, _encoding_error(reason, value))
        else:
            self.send(self._number, VALUE, data, beside=is_beside)

    def send(self, number: int, kind: int, data: bytes = b"", *, beside: bool = False) -> None:
        left = RESULT.pack(number, len(data), kind, beside) + data
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
            self.send(number, BARE_ERROR, pickle.dumps(texts))
            return
        self.send(number, kind, data)

    def _from_beside(self, number: int) -> Any:
        return _decoded(*receive_beside(self._beside, number))

    def _encoded(self, value: Any) -> tuple[bytes, bool]:
        """Return a value as bytes, and whether descriptors belong to it, which are sent."""
        kind = type(value)
        is_short = kind is list and len(value) <= _SHORT
        if kind in PLAIN or (is_short and PLAIN.issuperset(map(type, value))):
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            if len(data) <= _INLINE_BYTES:
                return data, False
        from ..transport.wire import pack, release

        copy_tensor, recurse = self.packing
        packed = pack(value, copy_tensor=copy_tensor, recurse=recurse)
        if not packed.fds:
            return packed.data, False
        try:
            _descriptors.send(self._beside, NUMBER.pack(self._number) + b"-", packed.fds)
        finally:
            release(packed)
        return packed.data, True


def _decoded(data: Any, fds: Any) -> Any:
    if not fds and data[0] == PICKLE:
        return pickle.loads(data)
    from ..transport.wire import unpack

    return unpack(data, fds)


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
        from ..transport.pickling import loads

        call = loads(call)
    return call(CtxPoolStorage.storage, *(args or ()), **(kwargs or {}))


def enter(
    holder: Any, context: Any, initializer: Callable[..., object] | None, initargs: Sequence[Any]
) -> None:
    """Begin as a worker with a context, which `WithContext` finds in the holder."""
    holder.storage = context
    if initializer is not None:
        initializer(*initargs)
