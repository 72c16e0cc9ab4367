"""Ctrl-C in a waiting call raises there; afterwards the pool works and can be ended."""

import contextlib
import os
import signal
import sys
import threading
import traceback

import pool_work as work
import pytest
from pool_checks import KINDS, nothing_left, wait_until

from stepwrap.parallel import Pool, PoolTerminatedError

CALLS = {
    "apply": lambda pool, *files: pool.apply(work.wait_for, files),
    "map": lambda pool, *files: pool.starmap(work.wait_for, [files], 1),
    "imap": lambda pool, *files: next(pool.imap(lambda pair: work.wait_for(*pair), [files])),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@contextlib.contextmanager
def interrupted_when(condition):
    """Press Ctrl-C once a condition holds, and check that the block raises."""
    has_come = threading.Event()

    def raise_once(*_):
        if not has_come.is_set():
            has_come.set()
            raise KeyboardInterrupt

    def press():
        wait_until(condition)
        # Repeat it, because Python misses a signal that comes just before a wait.
        while not has_come.wait(0.1):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def is_joining():
    frame = sys._current_frames()[threading.main_thread().ident]
    return any(caller.f_code is Pool.join.__code__ for caller, _ in traceback.walk_stack(frame))


def interrupted(call, pool, folder):
    """Interrupt a call while its task runs; return the file for which the task waits."""
    begun, go = folder / "begun", folder / "go"
    with interrupted_when(begun.exists):
        CALLS[call](pool, str(begun), str(go))
    return go


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_while_waiting(kind, call, tmp_path):
    """Other calls and new calls succeed, and the pool can be closed and joined."""
    with nothing_left():
        pool = KINDS[kind]()
        other = pool.map_async(work.square, range(50), 1)
        interrupted(call, pool, tmp_path).touch()
        assert other.get(60) == pool.map(work.square, range(50), 1) == [n * n for n in range(50)]
        pool.close()
        pool.join(30)
        del pool, other


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_in_join_then_terminated(kind, tmp_path):
    """Outstanding calls fail, and `join` waits for the workers as usual."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    with nothing_left():
        pool = KINDS[kind]()
        call = pool.apply_async(work.wait_for, (str(begun), str(go)))
        wait_until(begun.exists)
        pool.close()
        with interrupted_when(is_joining):
            pool.join()
        assert pool.size() == 2
        pool.terminate()
        with pytest.raises(PoolTerminatedError):
            call.get(0)
        go.touch()
        pool.join(30)
        assert pool.size() == 0
        del pool, call


def test_interrupted_with_block_leaves_nothing(tmp_path):
    """The exception propagates, and the workers end."""
    with nothing_left(), KINDS["Pool"]() as pool:
        interrupted("apply", pool, tmp_path)
    with pytest.raises(ValueError, match="Pool not running"):
        pool.apply(work.square, (1,))
