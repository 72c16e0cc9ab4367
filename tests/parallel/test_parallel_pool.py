"""The calls of pools: values, order, laziness, callbacks, and how often functions are sent."""

import functools
import os
import queue
import threading

import pool_tensor_work as tensor_work
import pool_work as work
import pytest
import torch
from pool_checks import wait_until

from stepwrap.parallel import (
    BasePool,
    BrokenPoolError,
    CtxPool,
    P2PPool,
    Pool,
    SimpleQueue,
    ThreadPool,
    TimeoutError,
    WorkerDiedError,
    proxy_ctx_caller,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(
    scope="module", params=[Pool, P2PPool, ThreadPool, BasePool], ids=lambda kind: kind.__name__
)
def pool(request):
    with request.param(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def processes():
    with Pool(2) as pool:
        yield pool


def run_all(targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_apply(pool):
    assert pool.apply(work.add, (1,), {"second": 2}) == 3
    assert pool.apply(work.add, [1]) == 1
    assert pool.apply_async(work.square, (4,)).get(60) == 16


@pytest.mark.parametrize("chunksize", [None, 1, 3, 100])
def test_map(pool, chunksize):
    numbers = range(37)
    assert pool.map(work.square, numbers, chunksize) == [n * n for n in numbers]
    assert pool.map(work.square, iter(numbers), chunksize) == [n * n for n in numbers]
    pairs = [(n, n + 1) for n in numbers]
    assert pool.starmap(work.add, pairs, chunksize) == [2 * n + 1 for n in numbers]
    assert pool.starmap_async(work.add, pairs, chunksize).get(60) == [2 * n + 1 for n in numbers]


@pytest.mark.parametrize("chunksize", [1, 4, 100])
def test_imap(pool, chunksize):
    numbers = range(37)
    assert list(pool.imap(work.square, numbers, chunksize)) == [n * n for n in numbers]
    results = list(pool.imap_unordered(work.square, iter(numbers), chunksize))
    assert sorted(results) == [n * n for n in numbers]


def test_nothing_to_do(pool):
    called = []
    assert pool.map(work.square, []) == []
    assert pool.map_async(work.square, [], callback=called.append).get(60) == []
    assert called == [[]]
    assert list(pool.imap(work.square, [])) == []
    assert list(pool.imap_unordered(work.square, iter([]), 3)) == []


@pytest.mark.parametrize("chunksize", [0, -1])
def test_chunksize_below_one(pool, chunksize):
    for call in (pool.map, pool.starmap, pool.imap, pool.imap_unordered, pool.map_async):
        with pytest.raises(ValueError, match="chunksize must be at least 1"):
            call(work.square, [1], chunksize)
    with pytest.raises(ValueError, match="lookahead"):
        pool.imap(work.square, [1], lookahead=0)


def test_error_of_a_map(pool):
    """The other results arrive; the task's own error is raised."""
    with pytest.raises(ValueError, match="bad 5"):
        pool.starmap(work.fail_at, [(n, 5) for n in range(10)], 1)
    iterator = pool.imap(work.fail_3, range(6))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="bad 3"):
        next(iterator)
    assert list(iterator) == [4, 5]


def test_not_ready(pool):
    call = pool.apply_async(work.nap, (1.0,))
    assert not call.ready()
    with pytest.raises(ValueError, match=r"apply\(nap\) .*not ready"):
        call.successful()
    with pytest.raises(TimeoutError, match=r"apply\(nap\)"):
        call.get(0.01)
    iterator = pool.imap(work.nap, [0.3])
    with pytest.raises(TimeoutError, match=r"imap\(nap\)"):
        iterator.next(timeout=0.01)
    assert iterator.next(timeout=60) == 0.3
    call.wait(20)
    assert call.ready()
    assert call.successful()
    failed = pool.apply_async(work.fail, ("x",))
    failed.wait(20)
    assert not failed.successful()


def test_callbacks(pool):
    values, errors = queue.SimpleQueue(), queue.SimpleQueue()
    pool.apply_async(work.square, (3,), callback=values.put, error_callback=errors.put).get(60)
    assert values.get(timeout=60) == 9
    pool.map_async(work.square, [1, 2], callback=values.put, error_callback=errors.put).get(60)
    assert values.get(timeout=60) == [1, 4]
    pool.apply_async(work.fail, ("x",), callback=values.put, error_callback=errors.put)
    assert isinstance(errors.get(timeout=60), KeyError)
    pool.starmap_async(work.fail_at, [(1, 1)], error_callback=errors.put)
    assert isinstance(errors.get(timeout=60), ValueError)
    assert values.empty()
    assert errors.empty()


def test_input_is_read_as_results_are_taken(pool):
    """It is read in the thread that takes the results, and only as far ahead as requested."""
    readers = []

    def numbers():
        for n in range(1000):
            readers.append(threading.current_thread())
            yield n

    iterator = pool.imap(work.square, numbers(), lookahead=5)
    assert not readers
    assert [next(iterator) for _ in range(10)] == [n * n for n in range(10)]
    assert len(readers) <= 15
    assert set(readers) == {threading.current_thread()}


def test_two_consumers(pool):
    iterator = pool.imap(work.square, range(400))
    results = [[], []]
    run_all([functools.partial(collected.extend, iterator) for collected in results])
    assert sorted(results[0] + results[1]) == [n * n for n in range(400)]


def test_many_callers(pool):
    """Calls from many threads do not mix."""
    wrong = []

    def call(base):
        for n in range(50):
            if pool.apply(work.add, (base, n)) != base + n:
                wrong.append((base, n))

    run_all([functools.partial(call, 1000 * index) for index in range(6)])
    assert not wrong


def test_large_values(pool):
    for size in (4000, 5000, 40_000, 300_000, 3_000_000):
        assert pool.apply(work.length, (b"y" * size,)) == size
        assert pool.apply(work.large, (size,)) == b"x" * size
    assert pool.map(work.length, [b"z" * 50_000] * 30, 1) == [50_000] * 30


def test_progress(pool, capsys):
    assert pool.map(work.square, range(8), progress=True) == [n * n for n in range(8)]
    assert "map(square)" in capsys.readouterr().out
    for method in ("imap", "imap_unordered"):
        iterator = getattr(pool, method)(work.square, range(8), progress=True)
        assert sorted(iterator) == [n * n for n in range(8)]
        assert f"{method}(square)" in capsys.readouterr().out


def test_functions_of_any_kind(processes):
    factor = 3
    assert processes.map(lambda n: n * factor, range(3)) == [0, 3, 6]
    data = bytes(1_000_000)
    results = processes.map(lambda n: n + len(data), range(40), 1)
    assert results == [1_000_000 + n for n in range(40)]


def test_function_travels_once(processes):
    """It is unpickled once per worker and call, not with each task."""
    counted = work.Counted()
    assert set(processes.map(counted, range(400), 1)) == {1}
    assert set(processes.map(counted, range(400), 1)) <= {1, 2}


def test_worker_without_torch(processes):
    assert processes.map(work.square, range(100), 1) == [n * n for n in range(100)]
    with Pool(1) as fresh:
        assert fresh.apply(work.has_module, ("torch",)) is False
        assert fresh.apply(work.has_module, ("cloudpickle",)) is False


@pytest.mark.parametrize("size", [3, 100_000])
def test_tensors_are_copied(processes, size):
    tensor = torch.zeros(size)
    assert torch.equal(processes.apply(tensor_work.increase, (tensor,)), torch.ones(size))
    assert torch.equal(tensor, torch.zeros(size))
    assert not tensor.is_shared()
    assert processes.apply(tensor_work.same_memory, (tensor, tensor)) is True
    tensors = processes.map(tensor_work.make, [size] * 6, 1)
    assert all(torch.equal(tensor, torch.arange(size, dtype=torch.float32)) for tensor in tensors)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tensors_by_reference(method):
    with Pool(2, is_copy_tensor=False, share_method="cpu", start_method=method) as pool:
        tensor = torch.zeros(1000)
        back = pool.apply(tensor_work.increase, (tensor,))
        assert torch.equal(tensor, torch.ones(1000))
        back.add_(1)
        assert torch.equal(tensor, torch.full((1000,), 2.0))
        assert pool.apply(lambda: tensor_work.total(tensor)) == 2000.0
        pool.map(tensor_work.increase, [tensor] * 50, 1)
        assert float(tensor.max()) <= 52.0


def counted(name):
    """Return a method that records its name, then calls the method of the base class."""

    def method(self):
        self.steps.append(name)
        getattr(super(Counting, self), name)()

    return method


class Counting:
    """Record the calls of the methods that a subclass may override."""

    def __init__(self, *args, **more):
        self.tasks, self.results, self.steps = [], [], []
        super().__init__(*args, **more)

    def pool_inqueue_put(self, task):
        self.tasks.append(task)
        super().pool_inqueue_put(task)

    def pool_outqueue_get(self, timeout):
        result = super().pool_outqueue_get(timeout)
        self.results.append(result)
        return result

    repopulate_pool = counted("repopulate_pool")
    maintain_pool = counted("maintain_pool")
    terminate_workers = counted("terminate_workers")
    join_workers = counted("join_workers")


class QueuePool(Counting, BasePool):
    def setup_queues(self):
        return SimpleQueue(ctx=self._ctx), SimpleQueue(ctx=self._ctx)


class CountingPool(Counting, Pool):
    """The same for the other kind of pool."""


@pytest.mark.parametrize("kind", [QueuePool, CountingPool])
def test_tasks_and_results_pass_the_pools_methods(kind):
    with kind(2) as pool:
        assert pool.apply(work.add, (1,), {"second": 2}) == 3
        assert pool.tasks == [(0, 0, work.add, (1,), {"second": 2})]
        assert pool.results == [(0, 0, (True, 3))]
        assert pool.map(work.square, range(6), 2) == [n * n for n in range(6)]
        assert [task[:2] for task in pool.tasks[1:]] == [(1, 0), (1, 1), (1, 2)]
        assert sorted(pool.results[1:]) == [
            (1, chunk, (True, [n * n for n in (2 * chunk, 2 * chunk + 1)])) for chunk in range(3)
        ]


def test_repopulating_calls_the_pools_methods(tmp_path):
    with CountingPool(1, maxtasksperchild=1, start_method="fork") as pool:
        assert pool.map(work.square, range(3), 1) == [0, 1, 4]
        wait_until(lambda: pool.steps.count("repopulate_pool") >= 3)
    assert "maintain_pool" in pool.steps


@pytest.mark.parametrize("kind", [QueuePool, CountingPool])
def test_the_end_calls_the_pools_methods(kind):
    with kind(1) as pool:
        assert pool.apply(work.square, (3,)) == 9
    assert pool.steps[-2:] == ["terminate_workers", "join_workers"]
    pool = kind(1)
    assert pool.apply(work.square, (3,)) == 9
    pool.close()
    pool.join(60)
    assert pool.steps[-1] == "join_workers"
    assert "terminate_workers" not in pool.steps


def test_recursive():
    """Only the globals that a local function refers to are sent with it."""
    with Pool(1, is_recursive=True) as pool:
        assert pool.apply(lambda: work.square(threading.get_ident() * 0 + 4)) == 16


def test_worker_of_a_base_pool_dies():
    """Only its current task is lost."""
    with BasePool(2) as pool:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            pool.apply_async(work.kill_self).get(60)
        assert pool.map(work.square, range(6), 1) == [n * n for n in range(6)]


@pytest.mark.parametrize(
    ("func", "args", "words"),
    [(work.kill_self, (), "SIGKILL"), (os._exit, (0,), "exited with code 0")],
)
def test_worker_of_a_pool_with_its_own_queues_dies(func, args, words):
    """Its task is unknown, so the pool reports that it is broken."""
    pool = QueuePool(2)
    with pytest.raises(BrokenPoolError, match=f"{words}.* not known which task"):
        pool.apply_async(func, args).get(60)
    pool.terminate()
    pool.join(60)


def test_worker_of_a_pool_with_its_own_queues_is_replaced():
    with QueuePool(1, maxtasksperchild=1) as pool:
        assert pool.map(work.square, range(3), 1) == [0, 1, 4]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_contexts(method):
    contexts = [["a"], ["b"]]
    with CtxPool(2, work.initialize, ("x",), worker_contexts=contexts, start_method=method) as pool:
        results = pool.map(work.use_context, range(40), 1)
        assert [number for _, number in results] == list(range(40))
        assert all(context in contexts for context, _ in results)
        assert pool.apply(work.stored_context)[1] == ["x"]
        changed = pool.apply(work.change_context, ("c",))
        assert changed in (["a", "c"], ["b", "c"])
    assert contexts == [["a"], ["b"]]


def test_replaced_worker_has_its_place_and_a_fresh_context():
    with CtxPool(1, worker_contexts=[["a"]], maxtasksperchild=1, start_method="fork") as pool:
        assert pool.apply(work.change_context, ("c",)) == ["a", "c"]
        assert pool.apply(work.change_context, ("d",)) == ["a", "d"]


def test_no_contexts():
    with CtxPool(1, start_method="fork") as pool:
        assert pool.apply(work.use_context, (3,)) == (None, 3)
    assert proxy_ctx_caller((work.use_context, (5,), {})) == (None, 5)
    assert proxy_ctx_caller(work.use_context, (), {"number": 2}) == (None, 2)


def test_function_of_a_call_that_pauses(processes):
    """An iterator that is read slowly sometimes has no running task, and then continues."""
    counted = processes.imap(work.Counted(), range(30), lookahead=1)
    assert max(counted) <= 3
