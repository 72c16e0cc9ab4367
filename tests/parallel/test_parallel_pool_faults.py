"""Faults of tasks and workers: the call that fails, its error, and that the pool still works."""

import multiprocessing.pool
import os
import re
import resource
import signal
import time

import pool_work as work
import pytest
from marks import slow
from pool_checks import children, wait_until

from stepwrap.parallel import (
    BasePool,
    BrokenPoolError,
    CtxPool,
    CtxThreadPool,
    EncodingError,
    P2PPool,
    Pool,
    RemoteError,
    RemoteTraceback,
    TaskTimeoutError,
    ThreadPool,
    TimeoutError,
    WorkerDiedError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def make(processes=2, **more):
    # Forking is quick, and these tests do not depend on the start method.
    return Pool(processes, start_method="fork", **more)


@pytest.fixture
def pool():
    with make() as pool:
        yield pool


DEATHS = {
    "killed": (work.kill_self, "SIGKILL"),
    "segfault": (work.segfault, "SIGSEGV"),
    "exit": (work.leave, "exited with code 3"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_death_loses_one_task(pool, death):
    """Other tasks of the same time succeed, and the pool replaces the worker."""
    func, words = DEATHS[death]
    before = [pool.apply_async(work.nap_and_square, (n,)) for n in range(6)]
    lost = pool.apply_async(func)
    after = [pool.apply_async(work.nap_and_square, (n,)) for n in range(6)]
    with pytest.raises(WorkerDiedError, match=words) as caught:
        lost.get(60)
    assert str(caught.value).startswith(f"apply({func.__name__}) is lost")
    assert caught.value.task == f"apply({func.__name__})"
    assert caught.value.pid != os.getpid()
    assert caught.value.exitcode == {"killed": -9, "segfault": -11, "exit": 3}[death]
    assert [result.get(60) for result in before + after] == [n * n for n in range(6)] * 2
    wait_until(lambda: pool.size() == 2)
    assert pool.map(work.square, range(50), 1) == [n * n for n in range(50)]


@pytest.mark.parametrize("death", DEATHS)
def test_death_in_a_map(pool, death):
    """Of many short tasks that are sent together only the one that dies is lost."""
    func, words = DEATHS[death]
    pool.map(work.square, range(500), 1)
    results = []
    for n in range(300):
        results.append(pool.apply_async(func if n == 150 else work.square, (n,)))
    with pytest.raises(WorkerDiedError, match=words):
        results.pop(150).get(60)
    assert [result.get(60) for result in results] == [n * n for n in range(300) if n != 150]


@pytest.mark.parametrize(
    ("count", "chunksize", "name"),
    [
        (6, 2, "items 2 to 3 of {} are lost"),
        (6, 1, "item 3 of {} is lost"),
        (5, 3, "items 3 to 4 of {} are lost"),
        (4, 3, "item 3 of {} is lost"),
    ],
)
def test_chunk_is_lost_as_a_whole(pool, count, chunksize, name):
    """The error names its items; the last chunk may be short."""
    with pytest.raises(WorkerDiedError) as caught:
        pool.map(work.kill_at_3, range(count), chunksize)
    assert str(caught.value).startswith(name.format("map(kill_at_3)"))
    with pytest.raises(WorkerDiedError) as caught:
        list(pool.imap(work.kill_at_3, iter(range(count)), chunksize))
    assert str(caught.value).startswith(name.format("imap(kill_at_3)"))
    assert pool.apply(work.square, (3,)) == 9


def test_killed_while_idle(pool):
    """A killed worker holds no lock or pipe that others need."""
    for _ in range(3):
        pids = {pool.apply(work.pid) for _ in range(20)}
        os.kill(pids.pop(), signal.SIGKILL)
        assert pool.map(work.square, range(20), 1) == [n * n for n in range(20)]
    wait_until(lambda: pool.size() == 2)


@pytest.mark.parametrize("retries", [1, 2])
def test_retries(retries, tmp_path):
    with make(retries=retries) as pool:
        path = str(tmp_path / "tries")
        assert pool.apply(work.die_first_times, (path, retries)) == "at last"
        with pytest.raises(WorkerDiedError):
            pool.apply(work.die_first_times, (path + "2", retries + 1))


def test_child_with_the_pipes_does_not_hide_a_death(pool):
    result = pool.apply_async(work.leave_a_child, (12,))
    with pytest.raises(WorkerDiedError):
        result.get(10)
    assert pool.apply(work.square, (4,)) == 16


def test_death_while_a_task_is_unpickled(pool):
    with pytest.raises(WorkerDiedError, match=r"apply\(take\)"):
        pool.apply_async(work.take, (work.Deadly(),)).get(60)
    assert pool.apply(work.square, (4,)) == 16


ERRORS = {
    "exception": (work.fail, ("gone",), KeyError, "gone"),
    "sys.exit": (work.system_exit, (), RemoteError, "SystemExit: 4"),
    "interrupt": (work.interrupt, (), RemoteError, "KeyboardInterrupt: mine"),
    "memory error": (work.memory_error, (), MemoryError, "mine"),
    "cannot be unpickled": (work.take, (work.Unloadable(),), RuntimeError, "not again"),
    "cannot be pickled": (work.take, (work.Unpicklable(),), TypeError, "not me"),
    "result cannot be pickled": (work.unpicklable_result, (), EncodingError, "generator"),
    "exception cannot be made anew": (work.odd_exception, (), work.OnlyOnce, "odd"),
    "exception of two arguments": (work.two_arguments, (), Exception, "one"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_of_a_task(pool, case):
    """The error keeps its type, and the same worker takes the next task."""
    func, args, kind, words = ERRORS[case]
    wait_until(lambda: pool.size() == 2)
    workers = children()
    quick = [pool.apply_async(work.square, (n,)) for n in range(3)]
    with pytest.raises(kind, match=words):
        pool.apply_async(func, args).get(60)
    assert [result.get(60) for result in quick] == [0, 1, 4]
    assert pool.apply(work.pid) in workers
    assert children() == workers


@pytest.mark.parametrize("tasks", [1, 2])
def test_task_that_cannot_be_unpickled_counts_for_maxtasksperchild(tasks):
    with make(1, maxtasksperchild=tasks) as pool:
        worker_pid = pool.apply_async(work.pid)
        calls = [pool.apply_async(work.take, (work.Unloadable(),)) for _ in range(tasks)]
        for call in calls:
            with pytest.raises(RuntimeError, match="not again"):
                call.get(60)
        assert pool.apply_async(work.pid).get(60) != worker_pid.get(60)


def test_result_that_needs_more_descriptors_than_the_caller_has(pool):
    """The call raises, and the pool still works."""
    assert len(pool.apply(bytes, (50_000,))) == 50_000
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(OSError, match="ulimit -n") as caught:
            pool.apply_async(bytes, (50_000,)).get(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert type(caught.value) is OSError
    assert len(pool.apply(bytes, (50_000,))) == 50_000


def test_traceback_of_the_worker(pool):
    with pytest.raises(KeyError) as caught:
        pool.apply(work.fail, ("gone",))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "pool_work.py" in str(caught.value.__cause__)


def test_limit_on_memory():
    with Pool(1) as pool, pytest.raises((MemoryError, RemoteError)):
        pool.apply_async(work.too_much_memory).get(60)


def test_parents_exception_is_the_error_of_the_input(pool):
    def numbers():
        yield 1
        raise LookupError("input")

    with pytest.raises(LookupError, match="input"):
        pool.map(work.square, numbers())
    iterator = pool.imap(work.square, numbers())
    assert next(iterator) == 1
    with pytest.raises(LookupError, match="input"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    iterator = pool.imap_unordered(work.square, numbers(), 2)
    # The chunk is incomplete.
    with pytest.raises(LookupError, match="input"):
        next(iterator)


def seven_then_an_error():
    yield from range(7)
    raise LookupError("input")


def results_until_the_end(iterator):
    """Return the values and the types of errors that an iterator gives."""
    results = []
    while True:
        try:
            results.append(next(iterator))
        except StopIteration:
            return results
        except Exception as error:
            results.append(type(error))


@pytest.mark.parametrize("method", ["imap", "imap_unordered"])
@pytest.mark.parametrize("chunksize", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(
    "kind", [ThreadPool, CtxThreadPool, *slow(make, BasePool, P2PPool, CtxPool)]
)
def test_incomplete_chunks_of_an_input_that_fails_are_dropped(kind, method, chunksize):
    with multiprocessing.pool.ThreadPool(1) as theirs:
        arguments = (work.square, seven_then_an_error(), chunksize)
        expected = results_until_the_end(getattr(theirs, method)(*arguments))
    assert expected == [n * n for n in range(7 - 7 % chunksize)] + [LookupError]
    function = (lambda _, n: n * n) if "Ctx" in kind.__name__ else work.square
    with kind(1) as pool:
        arguments = (function, seven_then_an_error(), chunksize)
        assert results_until_the_end(getattr(pool, method)(*arguments)) == expected


@pytest.mark.parametrize("kind", [make, ThreadPool, BasePool])
def test_initializer_fails(kind):
    fail = work.initializer_fails
    pool = kind(processes=2, initializer=lambda: fail())
    result_error = None
    try:
        pool.apply_async(work.square, (1,)).get(60)
    except BrokenPoolError as error:
        result_error = error
    assert "no such device" in str(result_error)
    with pytest.raises(BrokenPoolError, match="no such device"):
        pool.apply(work.square, (1,))
    pool.close()
    pool.join(60)


class Impatient(Pool):
    start_patience_s = 0.3


@pytest.mark.parametrize(
    ("kind", "death"), [(Impatient, "killed"), (Pool, "segfault"), (Pool, "exit")]
)
def test_initializer_ends_the_process(kind, death):
    """Three exits or crashes break the pool; kills are tolerated longer."""
    func, words = DEATHS[death]
    pool = kind(2, func, (1,) if death == "exit" else (), start_method="fork")
    with pytest.raises(BrokenPoolError, match=rf"\d+ workers failed .*last .*{words}"):
        pool.apply_async(work.square, (1,)).get(60)
    pool.terminate()
    pool.join(60)


def test_workers_that_cannot_be_replaced():
    """The pool tries again, and gives up after its patience."""
    with Impatient(1, start_method="fork") as pool:
        pid = pool.apply(work.pid)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(BrokenPoolError) as caught:
                pool.apply_async(work.square, (1,)).get(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert re.search(r"\d+ workers failed .*could not", str(caught.value))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_are_killed_from_outside_while_they_start(method, tmp_path):
    """No task is lost once they can start, however often they were killed."""
    folder, killed = tmp_path / "starting", set()
    folder.mkdir()
    begin = (work.wait_to_begin, (folder, tmp_path / "go"))
    with Pool(2, *begin, retries=1, start_method=method) as pool:
        calls = [pool.apply_async(work.square, (n,)) for n in range(20)]
        while len(killed) < 7:
            wait_until(lambda: set(os.listdir(folder)) - killed)
            for pid in set(os.listdir(folder)) - killed:
                os.kill(int(pid), signal.SIGKILL)
                killed.add(pid)
        (tmp_path / "go").touch()
        assert [call.get(60) for call in calls] == [n * n for n in range(20)]
        wait_until(lambda: pool.size() == 2)


def test_callback_raises(pool, caplog):
    """The error is logged, and results still arrive."""

    def callback(_):
        raise RuntimeError("callback")

    assert pool.apply_async(work.square, (2,), callback=callback).get(60) == 4
    with pytest.raises(KeyError):
        pool.apply_async(work.fail, ("x",), error_callback=callback).get(60)
    assert pool.map_async(work.square, [1, 2], callback=callback).get(60) == [1, 4]
    assert "the callback of apply(square) failed" in caplog.text


def test_task_timeout():
    with Pool(2, task_timeout=1, start_method="fork") as pool:
        slow = pool.apply_async(work.nap, (30,))
        quick = [pool.apply_async(work.square, (n,)) for n in range(10)]
        with pytest.raises(TaskTimeoutError, match=r"apply\(nap\) ran longer than task_timeout=1"):
            slow.get(60)
        assert [result.get(60) for result in quick] == [n * n for n in range(10)]
        assert issubclass(TaskTimeoutError, TimeoutError)
        assert pool.map(work.nap, [0.05] * 20, 1) == [0.05] * 20


def test_task_timeout_in_a_pool_that_has_been_idle():
    with Pool(2, task_timeout=1, start_method="fork") as pool:
        assert pool.map(work.square, range(4), 1) == [0, 1, 4, 9]
        time.sleep(0.1)
        with pytest.raises(TaskTimeoutError):
            pool.apply_async(work.nap, (60,)).get(60)


def test_large_tasks_for_workers_that_have_just_been_killed(pool):
    """Other workers get the tasks, like small ones."""
    data = b"x" * 50_000
    for _ in range(5):
        pids = {pool.apply(work.pid) for _ in range(4)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        calls = [pool.apply_async(work.length, (data,)) for _ in range(6)]
        assert [call.get(60) for call in calls] == [50_000] * 6


def test_short_tasks_do_not_wait_behind_a_long_one(pool):
    """Tasks that were sent ahead are moved to idle workers."""
    pool.map(work.square, range(2000), 1)
    naps = [pool.apply_async(work.square, (n,)) for n in range(40)]
    long = pool.apply_async(work.nap, (60,))
    quick = [pool.apply_async(work.square, (n,)) for n in range(40)]
    assert [result.get(60) for result in naps + quick] == [n * n for n in range(40)] * 2
    assert not long.ready()


def test_tasks_that_wait_for_each_other(pool, tmp_path):
    """They run at the same time if there are workers for both, whatever ran before."""
    pool.map(work.square, range(2000), 1)
    for attempt in range(5):
        path_a, second = str(tmp_path / f"a{attempt}"), str(tmp_path / f"b{attempt}")
        calls = [pool.apply_async(work.square, (n,)) for n in range(31)]
        meeting = [
            pool.apply_async(work.wait_for, (path_a, second)),
            pool.apply_async(work.wait_for, (second, path_a)),
        ]
        assert [result.get(60) for result in meeting] == [True, True]
        assert [result.get(60) for result in calls] == [n * n for n in range(31)]


def test_many_deaths_at_once(pool):
    """Half of the tasks die; all others return their values."""
    calls = [pool.apply_async(work.kill_self if n % 2 else work.square, (n,)) for n in range(12)]
    for n, call in enumerate(calls):
        if n % 2:
            with pytest.raises(WorkerDiedError):
                call.get(60)
        else:
            assert call.get(60) == n * n
