"""Functions for the workers of the pool tests; without torch, so that they start fast."""

import collections
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
import uuid
import weakref


def square(number):
    return number * number


def add(base, second=0):
    return base + second


def pid(_=None):
    return os.getpid()


def nap(seconds):
    time.sleep(seconds)
    return seconds


def nap_and_square(number):
    time.sleep(0.02)
    return number * number


def fail(text):
    raise KeyError(text)


def fail_at(number, bad):
    if number == bad:
        raise ValueError(f"bad {number}")
    return number


def fail_3(number):
    return fail_at(number, 3)


def kill_self(_=None):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_3(number):
    if number == 3:
        kill_self()
    return number


def segfault(_=None):
    faulthandler.disable()
    ctypes.string_at(0)


def leave(_=None):
    os._exit(3)


def system_exit(_=None):
    sys.exit(4)


def interrupt(_=None):
    raise KeyboardInterrupt("mine")


def exhausted_at_3(number):
    return next(iter([] if number == 3 else [number]))


def memory_error(_=None):
    raise MemoryError("mine")


def too_much_memory(_=None):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return len(bytearray(1 << 31))


def unpicklable_result(_=None):
    return (value for value in ())


class TwoArguments(Exception):
    def __init__(self, reason, second):
        super().__init__(f"{reason} {second}")
        self.lock = multiprocessing.get_context("spawn")


class OnlyOnce(Exception):
    """An error that can be pickled, but not unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("not again")


def odd_exception(_=None):
    raise OnlyOnce("odd")


def two_arguments(_=None):
    raise TwoArguments("one", "two")


class Unloadable:
    def __reduce__(self):
        return _refuse, ()


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not me")


class Deadly:
    """Kill the process that unpickles it."""

    def __reduce__(self):
        return kill_self, ()


def take(value):
    return type(value).__name__


def child_result(_=None):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    return process.exitcode


def leave_a_child(seconds):
    """Kill this process while its child has all its pipes open."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_first_times(path, times):
    with open(path, "a+") as file:
        file.write("x")
        file.flush()
        file.seek(0)
        if len(file.read()) <= times:
            kill_self()
    return "at last"


def wait_for(path, other):
    """Wait for another task that runs at the same time."""
    open(path, "w").close()
    deadline = time.monotonic() + 20
    while not os.path.exists(other):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def wait_to_begin(folder, go):
    """Create a file for this worker, and wait until the file `go` exists."""
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while not os.path.exists(go):
        time.sleep(0.002)


initialized = []


def initialize(*values):
    initialized.extend(values)


def get_initialized(_=None):
    return list(initialized)


def initializer_fails(*_):
    raise OSError("no such device")


def has_module(name):
    return name in sys.modules


def signal_action(signum):
    return int(signal.getsignal(signum))


def use_context(context, number=0):
    return context, number


def change_context(context, value):
    context.append(value)
    return context


def stored_context(_context):
    from stepwrap.parallel import CtxPoolStorage

    return CtxPoolStorage.storage, list(initialized)


def large(size):
    return b"x" * size


def length(data):
    return len(data)


class Counted:
    """A callable that counts how often it was unpickled in its process."""

    loads = collections.Counter()

    def __init__(self):
        self.name = uuid.uuid4()

    def __call__(self, _):
        return Counted.loads[self.name]

    def __setstate__(self, state):
        self.name = state["name"]
        Counted.loads[self.name] += 1


class CountedFunction:
    """A callable that counts how often it was pickled, and unpickled in a worker."""

    created, alive = 0, weakref.WeakSet()

    def __init__(self):
        self.pickled = 0

    def __getstate__(self):
        self.pickled += 1
        return {}

    def __setstate__(self, state):
        CountedFunction.created += 1
        CountedFunction.alive.add(self)

    def __call__(self, _):
        return CountedFunction.created


def open_memory_files(_=None):
    """Return this worker's process id and its number of open in-memory files of the pool."""
    time.sleep(0.05)
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return os.getpid(), sum("stepwrap-worker" in name for name in names)


def alive(_=None):
    """Return how many `CountedFunction` objects are alive in this worker."""
    return len(CountedFunction.alive)


class SlowlyFreed:
    """An object that takes 0.3 s to be freed in workers."""

    def __init__(self):
        self.home = os.getpid()

    def __del__(self):
        if os.getpid() != self.home:
            time.sleep(0.3)


def fork_and_come_out(number):
    os.fork()
    return number
