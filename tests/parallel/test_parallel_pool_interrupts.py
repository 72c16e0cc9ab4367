"""Signal handlers that raise, Ctrl-C's among them, in the midst of calls: others lose nothing."""

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter

import pool_work as work
import pytest
from pool_checks import nothing_left

from stepwrap.parallel import P2PPool, Pool, ThreadPool

KINDS = {
    "Pool": lambda: Pool(2, start_method="fork"),
    "P2PPool": lambda: P2PPool(2, start_method="fork"),
    "ThreadPool": lambda: ThreadPool(2),
}
INTERRUPTS = 80
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Interrupt(BaseException):
    """What the signal's handler raises."""


def storm(call, pool):
    """Call again and again, each time until a signal interrupts it, at any step."""
    armed = []

    def interrupt(*_):
        # A signal may be late: another thread may have got it.
        if armed:
            raise Interrupt

    delays = random.Random(0)
    arrived = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    # Python ignores what a handler raises in a callback of its collector, and hypothesis has one.
    gc.disable()
    try:
        for _ in range(INTERRUPTS):
            try:
                try:
                    armed.append(True)
                    signal.setitimer(signal.ITIMER_REAL, delays.uniform(2e-4, 3e-3))
                    # Not for ever: what was lost is to be told of below.
                    until = time.monotonic() + 10
                    while time.monotonic() < until:
                        call(pool)
                finally:
                    armed.clear()
            except Interrupt:
                armed.clear()
                arrived += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert arrived == INTERRUPTS


class Other(threading.Thread):
    """A caller that no signal interrupts; it knows what went wrong, and its tasks."""

    def __init__(self, pool, file, numbers):
        super().__init__()
        self.pool, self.file, self.numbers = pool, file, numbers
        self.wrong, self.tasks = [], []
        self.may_end = threading.Event()

    def run(self):
        """Map until told to end."""
        try:
            while not self.may_end.is_set():
                tasks = [(self.file, next(self.numbers)) for _ in range(50)]
                self.tasks += [number for _, number in tasks]
                values = self.pool.starmap_async(work.log_number, tasks, 1).get(30)
                assert values == [number for _, number in tasks]
        except BaseException as error:
            self.wrong.append(error)


CALLS = {
    "apply": lambda pool, tasks: [pool.apply(work.log_number, task) for task in tasks],
    "large": lambda pool, tasks: [
        pool.apply(work.log_number, (*task, b"x" * 9000)) for task in tasks
    ],
    "map": lambda pool, tasks: pool.starmap(work.log_number, tasks, 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_calls(kind, call, tmp_path):
    """What others submit runs once, nothing runs twice, and the pool ends."""
    numbers = itertools.count()
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    with nothing_left():
        pool = KINDS[kind]()
        other = Other(pool, file, numbers)
        other.start()
        # What is imported at first use is: Python's imports are not to be interrupted.
        CALLS[call](pool, [(file, next(numbers))])
        storm(lambda to: CALLS[call](to, [(file, next(numbers)) for _ in range(30)]), pool)
        other.may_end.set()
        other.join(60)
        assert other.wrong == []
        pool.close()
        pool.join(60)
        del pool, other.pool
    ran = Counter(os.pread(file, os.fstat(file).st_size, 0).split())
    os.close(file)
    assert set(ran.values()) == {1}
    assert {b"%d" % number for number in other.tasks} <= set(ran)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_iterators(kind):
    """They go on or end, and what they give is in its order."""
    iterators = []

    def call(pool):
        iterators.append(pool.imap(work.square, range(200), lookahead=5))
        for _ in iterators[-1]:
            pass

    with nothing_left():
        pool = KINDS[kind]()
        call(pool)
        storm(call, pool)
        for iterator in iterators:
            values = list(iterator)
            assert values == sorted(set(values))
        iterators.clear()
        assert pool.map(work.square, range(50), 1) == [n * n for n in range(50)]
        pool.close()
        pool.join(60)
        del pool, iterator


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_calls_then_terminate(kind):
    with nothing_left():
        pool = KINDS[kind]()
        pool.map(work.square, range(9), 1)
        storm(lambda to: to.map_async(work.square, range(100), 1).get(30), pool)
        pool.terminate()
        pool.join(60)
        del pool
