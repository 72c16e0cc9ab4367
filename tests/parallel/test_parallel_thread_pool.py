"""Pools of threads: arguments by reference, separate contexts, their end."""

import queue
import threading

import pytest
from pool_checks import nothing_left

from stepwrap.parallel import (
    BrokenPoolError,
    CtxPoolStorage,
    CtxThreadPool,
    PoolTerminatedError,
    RemoteError,
    ThreadPool,
    proxy_ctx_caller,
)


class QueueThreadPool(ThreadPool):
    def setup_queues(self):
        return queue.SimpleQueue(), queue.SimpleQueue()


def test_everything_by_reference():
    with ThreadPool(2) as pool:
        mine = []
        pool.apply(mine.append, (3,))
        assert mine == [3]
        assert pool.apply(lambda value: value, (mine,)) is mine

        class Mine(Exception):
            def __init__(self, text, second):
                super().__init__()

        def fail():
            raise Mine(1, 2)

        with pytest.raises(Mine):
            pool.apply(fail)
        with pytest.raises(RemoteError, match="SystemExit: 3") as caught:
            pool.apply_async(exit, (3,)).get(60)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert pool.size() == 2


def test_threads():
    names = set()
    barrier = threading.Barrier(3)

    def meet(_):
        names.add(threading.current_thread())
        barrier.wait(20)

    with nothing_left():
        with ThreadPool(3) as pool:
            pool.map(meet, range(3), 1)
            assert len(names) == 3
        pool.join(60)
        assert not any(thread.is_alive() for thread in names)
        del pool


@pytest.mark.parametrize("kind", [ThreadPool, QueueThreadPool])
def test_terminate_ends_idle_threads(kind):
    with nothing_left():
        pool = kind(2)
        assert pool.apply(abs, (-3,)) == 3
        pool.terminate()
        pool.join(60)
        del pool


@pytest.mark.parametrize("kind", [ThreadPool, QueueThreadPool])
def test_terminate_does_not_wait_for_running_tasks(kind):
    release = threading.Event()
    begun = threading.Event()
    ran = []

    def run():
        begun.set()
        release.wait(20)

    with nothing_left():
        pool = kind(1)
        running = pool.apply_async(run)
        queued = pool.map_async(ran.append, range(5), 1)
        assert begun.wait(20)
        pool.terminate()
        for call in (running, queued):
            with pytest.raises(PoolTerminatedError):
                call.get(0)
        release.set()
        pool.join(60)
        assert ran == []
        del pool, running, queued, call


def test_initializer():
    calls = []
    with ThreadPool(2, calls.append, (1,)) as pool:
        pool.map(lambda _: None, range(10), 1)
        assert 1 <= len(calls) <= 2

    def fails():
        raise OSError("no device")

    pool = ThreadPool(2, fails)
    with pytest.raises(BrokenPoolError, match="no device"):
        pool.apply_async(print).get(60)
    pool.terminate()
    pool.join(60)


def test_contexts_of_two_pools_keep_apart():
    with (
        CtxThreadPool(2, worker_contexts=[1, 2]) as numbers,
        CtxThreadPool(2, worker_contexts=["a", "b"]) as second,
    ):
        results = numbers.map_async(lambda context, n: (context, n), range(50), 1)
        two = second.map_async(lambda context, n: (context, n), range(50), 1)
        assert {context for context, _ in results.get(60)} <= {1, 2}
        assert {context for context, _ in two.get(60)} <= {"a", "b"}
    with CtxThreadPool(1) as pool:
        assert pool.apply(lambda context: context) is None
    with pytest.raises(ValueError, match="Context number is not equal"):
        CtxThreadPool(2, worker_contexts=[1])


def test_context_without_the_argument():
    """Initializers and functions that do not get it find it, each thread its own."""
    calls = []
    barrier = threading.Barrier(2)

    def initialize(*words):
        barrier.wait(20)
        calls.append((CtxPoolStorage.storage, *words))

    def find(context, _):
        barrier.wait(20)
        return context, CtxPoolStorage.storage, proxy_ctx_caller(lambda value: value, ())

    with CtxThreadPool(2, initialize, ("x",), worker_contexts=["a", "b"]) as pool:
        results = pool.map(find, range(2), 1)
        assert sorted(results) == [("a", "a", "a"), ("b", "b", "b")]
        assert sorted(calls) == [("a", "x"), ("b", "x")]
        assert CtxPoolStorage.storage is None
    with CtxThreadPool(1) as pool:

        def store(_):
            CtxPoolStorage.storage = "new"

        pool.apply(store)
        assert pool.apply(lambda context: context) == "new"
    assert CtxPoolStorage.storage is None
