"""Start and end of pools: close, terminate, garbage collection, death of the parent; leaks."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pool_work as work
import pytest
from pool_checks import KINDS, is_running, nothing_left, wait_until
from programs import run_script

from stepwrap.parallel import (
    BasePool,
    CtxPool,
    CtxThreadPool,
    Pool,
    PoolTerminatedError,
    ThreadPool,
    TimeoutError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_close_finishes_accepted_tasks(make):
    """Tasks that are queued or not yet read from an iterator still run."""
    with nothing_left():
        pool = make()
        calls = [pool.apply_async(work.nap_and_square, (n,)) for n in range(10)]
        numbers = []
        pool.imap(work.square, (numbers.append(n) or n for n in range(500)), lookahead=2)
        pool.close()
        with pytest.raises(ValueError, match="Pool not running"):
            pool.apply(work.square, (1,))
        pool.join(30)
        assert [call.get(0) for call in calls] == [n * n for n in range(10)]
        assert numbers == list(range(500))
        assert pool.size() == 0
        del pool


def test_terminate_fails_outstanding_calls(make):
    with nothing_left():
        pool = make()
        running = [pool.apply_async(work.nap, (2.0,)) for _ in range(2)]
        queued = pool.map_async(work.square, range(1000), 1)
        iterator = pool.imap(work.nap, [2.0, 2.0])
        start = time.monotonic()
        pool.terminate()
        assert time.monotonic() - start < 10
        for result in (*running, queued):
            with pytest.raises(PoolTerminatedError):
                result.get(10)
        with pytest.raises(PoolTerminatedError):
            next(iterator)
        pool.join(60)
        del pool, iterator, running, queued, result


@pytest.mark.slow
def test_worker_that_ignores_the_first_signal():
    with nothing_left():
        pool = Pool(1, signal.signal, (signal.SIGTERM, signal.SIG_IGN), start_method="fork")
        assert pool.apply(work.signal_action, (signal.SIGTERM,)) == int(signal.SIG_IGN)
        assert pool.apply(work.signal_action, (signal.SIGINT,)) == int(signal.SIG_IGN)
        call = pool.apply_async(work.nap, (60,))
        pool.terminate()
        with pytest.raises(PoolTerminatedError):
            call.get(0)
        del pool, call


def test_with_terminates(make):
    with nothing_left():
        with make() as pool:
            assert pool.apply(work.square, (3,)) == 9
        with pytest.raises(ValueError, match="Pool not running"):
            pool.map(work.square, [1])
        pool.join(60)
        del pool


def test_unclosed_pool_is_collected(make):
    with nothing_left():
        pool = make()
        assert pool.map(work.square, range(5)) == [0, 1, 4, 9, 16]
        iterator = pool.imap(work.square, iter(range(1000)), lookahead=3)
        assert next(iterator) == 0
        # The items that were read ahead are running.
        assert next(iterator) == 1
        ref = weakref.ref(pool)
        del pool, iterator
        wait_until(lambda: gc.collect() is not None and ref() is None)


def test_results_keep_their_pool(make):
    """Nothing else refers to the pool here."""
    with nothing_left():
        call = make().apply_async(work.nap, (0.2,))
        gc.collect()
        assert call.get(60) == 0.2
        del call


def test_join_needs_close(make):
    with make() as pool:
        with pytest.raises(ValueError, match="still running"):
            pool.join()
        pool.apply_async(work.nap, (0.5,))
        pool.close()
        with pytest.raises(TimeoutError):
            pool.join(0.01)


def test_close_then_terminate(make):
    with nothing_left():
        pool = make()
        call = pool.apply_async(work.nap, (1.0,))
        pool.close()
        pool.terminate()
        with pytest.raises(PoolTerminatedError):
            call.get(10)
        pool.terminate()
        pool.close()
        pool.join(60)
        del pool, call


def test_terminate_in_a_callback(make):
    pool = make()
    call = pool.apply_async(work.square, (3,), callback=lambda _: pool.terminate())
    assert call.get(60) == 9
    pool.join(60)


@pytest.mark.parametrize(
    "kind", [Pool, ThreadPool, CtxPool, CtxThreadPool, BasePool], ids=lambda k: k.__name__
)
def test_mistakes_at_construction(kind):
    with pytest.raises(ValueError, match="Number of processes must be at least 1"):
        kind(0)
    for wrong in (1.5, "12", True):
        with pytest.raises(TypeError, match=f"processes must .*whole number, got {wrong!r}"):
            kind(wrong)
    with pytest.raises(TypeError, match="initializer must be a callable"):
        kind(1, initializer=3)
    if kind is not CtxThreadPool:
        with pytest.raises(ValueError, match="maxtasksperchild must be at least 1"):
            kind(1, maxtasksperchild=0)
        for wrong in (1.5, "12", True):
            message = f"maxtasksperchild must be a whole number, got {wrong!r}"
            with pytest.raises(TypeError, match=message):
                kind(1, maxtasksperchild=wrong)


@pytest.mark.parametrize("kind", [Pool, CtxPool], ids=lambda k: k.__name__)
def test_options_that_are_no_numbers(kind):
    for wrong in ("3", 1.5):
        with pytest.raises(TypeError, match=f"retries must .*whole number, got {wrong!r}"):
            kind(1, retries=wrong)
    with pytest.raises(TypeError, match="task_timeout must .*seconds .*None, got '3'"):
        kind(1, task_timeout="3")


def test_arguments_of_calls_that_are_no_numbers():
    with ThreadPool(1) as pool:
        for wrong in ("3", 1.5, True):
            for method in (pool.map, pool.starmap, pool.imap, pool.imap_unordered):
                with pytest.raises(
                    TypeError, match=f"chunksize must .*whole number, got {wrong!r}"
                ):
                    method(work.square, [1], wrong)
            with pytest.raises(TypeError, match=f"lookahead must .*whole number, got {wrong!r}"):
                pool.imap(work.square, [1], lookahead=wrong)
        call, iterator = pool.apply_async(work.square, (1,)), pool.imap(work.square, [1])
        pool.close()
        for method in (call.get, call.wait, iterator.next, pool.join):
            with pytest.raises(TypeError, match="timeout must .*seconds or None"):
                method("3")


def test_mistakes_of_options():
    with pytest.raises(RuntimeError, match='Invalid share method: "disk"'):
        Pool(1, is_copy_tensor=False, share_method="disk")
    with pytest.raises(ValueError, match="retries"):
        Pool(1, retries=-1)
    with pytest.raises(ValueError, match="task_timeout"):
        Pool(1, task_timeout=0)
    with pytest.raises(ValueError, match="Context number is not equal"):
        CtxPool(2, worker_contexts=[1])
    with pytest.raises(TypeError, match="not me"):
        Pool(1, work.initialize, (work.Unpicklable(),))


def test_pool_cannot_be_pickled(make):
    with make() as pool, pytest.raises(NotImplementedError, match="cannot be passed"):
        pickle.dumps(pool)


@pytest.mark.parametrize("tasks", [1, 3])
def test_maxtasksperchild(tasks):
    with nothing_left():
        pool = KINDS["Pool"](maxtasksperchild=tasks)
        pids = pool.map(work.pid, range(12), 1)
        assert all(pids.count(pid) <= tasks for pid in pids)
        assert pool.map(work.square, range(8), 1) == [n * n for n in range(8)]
        pool.close()
        pool.join(30)
        del pool


def test_maxtasksperchild_of_threads():
    with ThreadPool(2, maxtasksperchild=2) as pool:
        assert pool.map(work.square, range(12), 1) == [n * n for n in range(12)]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_start_methods(method):
    """The whole life of a pool, including a death, for each start method."""
    offset = 5
    pool = Pool(2, work.initialize, (1, lambda n: n), start_method=method)
    assert len(pool.apply(work.get_initialized)) == 2
    assert pool.map(lambda n: n + offset, range(4)) == [5, 6, 7, 8]
    pids = {pool.apply(work.pid) for _ in range(10)}
    os.kill(pids.pop(), signal.SIGKILL)
    assert pool.map(work.square, range(10), 1) == [n * n for n in range(10)]
    pool.close()
    pool.join(60)
    assert not any(map(is_running, pids))


def test_workers_with_children():
    with Pool(1, is_daemon=False, start_method="fork") as pool:
        assert pool.apply(work.child_result) == 0
    with Pool(1, start_method="fork") as pool, pytest.raises(AssertionError, match="daemonic"):
        pool.apply(work.child_result)


def run(text):
    """Start a Python program that can import the module `work`."""
    words = [sys.executable, "-c", textwrap.dedent(text)]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(work.__file__)}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_end_with_a_killed_parent(method):
    """Busy workers, too."""
    program = run(f"""
        import pool_work as work, time
        from stepwrap.parallel import Pool
        pool = Pool(2, start_method="{method}")
        pids = set()
        while len(pids) < 2:
            pids.update(pool.map(work.pid, range(8), 1))
        pool.apply_async(work.nap, (60,))
        time.sleep(0.1)
        print(*pids, flush=True)
        time.sleep(60)
    """)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2
    program.kill()
    program.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, pids)), 20)


@pytest.mark.parametrize("is_daemon", [True, False])
def test_program_ends_with_an_open_pool(is_daemon):
    """It ends whatever its workers are doing."""
    program = run(f"""
        import pool_work as work
        from stepwrap.parallel import Pool, ThreadPool
        pool = Pool(2, is_daemon={is_daemon}, start_method="fork")
        print(pool.apply(work.pid), flush=True)
        threads = ThreadPool(2)
        call = pool.apply_async(work.nap, (60,)), threads.apply_async(work.nap, (60,))
    """)
    pid, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    wait_until(lambda: not is_running(int(pid)), 10)


def test_missing_guard(tmp_path):
    """A script that starts its pool at the top level gets an error that names the guard."""
    code = "from stepwrap.parallel import Pool\nprint(Pool(1).apply(abs, (3,)))\n"
    with pytest.raises(AssertionError) as caught:
        run_script(code, tmp_path)
    assert 'if __name__ == "__main__":' in str(caught.value)
    assert "BrokenPoolError" in str(caught.value)


def test_pool_in_a_forked_process():
    """A copy of the pool raises instead of hanging; the pool itself still works."""
    with Pool(1, start_method="fork") as pool:
        assert pool.apply(work.square, (2,)) == 4
        child = os.fork()
        if child == 0:
            try:
                pool.apply(work.square, (2,))
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert pool.apply(work.square, (3,)) == 9


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool"])
def test_a_forked_process_leaves_the_pool_to_its_parent(kind, tmp_path):
    program = f"""
import os
from stepwrap.parallel import {kind}

if __name__ == "__main__":
    with {kind}(1) as pool:
        pool.apply(abs, (-1,))
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print("child", code, "parent", pool.apply(abs, (-2,)))
    if not child:
        try:
            pool.join()
        except RuntimeError:
            os._exit(7)
"""
    assert run_script(program, tmp_path) == "child 7 parent 2\n"


AFTER_OPENMP = """
import multiprocessing, torch
from stepwrap.parallel import Pool, Process, SimpleQueue

LARGE, FORK = 1_000_000, multiprocessing.get_context("fork")


def total(tensor):
    return float((tensor + 1).sum())


def by_queue(context):
    given, back, scale = SimpleQueue(), SimpleQueue(), 3
    process = Process(target=lambda: back.put(scale * total(given.get())), ctx=context, daemon=True)
    process.start()
    given.put(torch.ones(LARGE))
    return back.get(60)


def by_reference(method):
    scale, options = 3, dict(is_copy_tensor=False, share_method="cpu", start_method=method)
    # The second worker is started after the pool's own thread has copied a large tensor.
    with Pool(1, print, ("begun",), 1, **options) as pool:
        call = lambda tensor: scale * total(tensor)
        calls = [pool.apply_async(call, (torch.ones(LARGE),)) for _ in range(2)]
        return max(call.get(60) for call in calls)


if __name__ == "__main__":
    torch.set_num_threads(2)
    assert total(torch.ones(LARGE)) == 2 * LARGE
    assert by_queue(None) == by_queue(FORK) == 6 * LARGE
    assert by_reference(None) == by_reference("fork") == 6 * LARGE
"""


@pytest.mark.slow
def test_large_operations_after_the_parents_threads_have_run(tmp_path):
    """By default and with fork; with lambdas and closures."""
    lines = run_script(AFTER_OPENMP, tmp_path).split()
    # Another worker may begin before a pool ends.
    assert len(lines) >= 4
    assert set(lines) == {"begun"}
