"""Kinds of pools, and checks for leaked threads, processes, descriptors and memory."""

import contextlib
import gc
import multiprocessing
import os
import threading
import time

from stepwrap.parallel import Pool, ThreadPool

KINDS = {
    "Pool": lambda *args, **more: Pool(2, *args, start_method="fork", **more),
    "ThreadPool": lambda *args, **more: ThreadPool(2, *args, **more),
}


def wait_until(condition, timeout_s=20.0, story=lambda: "it did not come"):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, story()
        time.sleep(0.005)


def is_running(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def children():
    """Return the process ids of this process's running children."""
    return {process.pid for process in multiprocessing.active_children()}


def surroundings():
    """Return this process's children, threads, number of descriptors and named shared memory."""
    gc.collect()
    # Other processes use the folder, too.
    shared = {name for name in os.listdir("/dev/shm") if str(os.getpid()) in name}
    return children(), set(threading.enumerate()), len(os.listdir("/proc/self/fd")), shared


@contextlib.contextmanager
def nothing_left():
    """Check that the block leaves nothing behind."""
    before = surroundings()
    yield
    remaining = []

    def is_gone():
        remaining[:] = surroundings()
        return all(current <= earlier for current, earlier in zip(remaining, before, strict=True))

    wait_until(is_gone, 10, lambda: f"{remaining} is left, it was {before}")
