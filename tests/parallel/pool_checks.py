"""What is left of pools: threads, processes, descriptors, shared memory."""

import contextlib
import gc
import multiprocessing
import os
import threading
import time


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def is_running(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def surroundings():
    # Resource trackers and fork servers stay, and their pipes.
    gc.collect()
    children = {process.pid for process in multiprocessing.active_children()}
    return (
        children,
        set(threading.enumerate()),
        len(os.listdir("/proc/self/fd")),
        set(os.listdir("/dev/shm")),
    )


@contextlib.contextmanager
def nothing_left():
    """Check that the block leaves nothing behind."""
    before = surroundings()
    yield
    wait_until(lambda: surroundings() == before or (gc.collect() and False), 10)
