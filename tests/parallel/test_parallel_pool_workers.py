"""Resources that workers keep: functions, descriptors, children of tasks."""

import contextlib
import os
import signal
import sys
from functools import partial

import pool_tensor_work as tensor_work
import pool_work as work
import pytest
import torch
from pool_checks import nothing_left

from stepwrap.parallel import Pool, ThreadPool, WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def make(processes):
    return Pool(processes, start_method="fork")


@pytest.mark.parametrize("then", ["close", "map"])
def test_many_functions_in_turn(then):
    """The pipe always has room to send tasks and to stop the worker."""
    with make(1) as pool:
        iterators = [pool.imap(lambda n: n, iter(range(2)), lookahead=1) for _ in range(100)]
        assert [next(iterator) for iterator in iterators] == [0] * 100
        assert [next(iterator) for iterator in iterators] == [1] * 100
        # The worker has answered, but does not read yet.
        assert pool.apply(type, (work.SlowlyFreed(),)) is work.SlowlyFreed
        assert [next(iterator, None) for iterator in iterators] == [None] * 100
        if then == "map":
            assert pool.map(work.square, range(200), 1) == [n * n for n in range(200)]
        pool.close()
        pool.join(60)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_functions_of_maps_in_turn_are_pickled_and_made_once(lookahead):
    """Also with a call in between; a worker frees them after the maps."""
    functions = [work.CountedFunction() for _ in range(3)]
    with make(1) as pool:
        iterators = [
            pool.imap(function, iter(range(20)), lookahead=lookahead) for function in functions
        ]
        for _ in range(15):
            values = [next(iterator) for iterator in iterators]
            assert pool.apply(work.alive) == 3
        assert values == [3, 3, 3]
        assert [list(iterator) for iterator in iterators] == [[3] * 5] * 3
        assert pool.apply(work.alive) == 0
        assert [function.pickled for function in functions] == [1, 1, 1]


def test_more_maps_in_turn_than_a_worker_keeps_functions_of():
    with make(1) as pool:
        iterators = [
            pool.imap(work.CountedFunction(), iter(range(3)), lookahead=1) for _ in range(20)
        ]
        for _ in range(3):
            for iterator in iterators:
                next(iterator)
                assert pool.apply(work.alive) <= 8


def test_forked_workers_have_nothing_of_workers_before_them_open():
    with make(3) as pool:
        counts = {}
        while len(counts) < 3:
            counts.update(pool.map(work.open_memory_files, range(12), 1))
        assert set(counts.values()) == {1}


def test_tensors_by_file_name_in_the_function_of_a_map():
    """torch counts the pickles of such a tensor, and removes its file after as many receivers."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.full((3,), 5).share_memory_()
        options = {"is_copy_tensor": False, "share_method": "cpu", "start_method": "fork"}
        with Pool(3, **options) as pool:
            for _ in range(3):
                results = pool.map(partial(tensor_work.plus_first, tensor), range(30), chunksize=1)
                assert results == list(range(5, 35))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_unordered_results_arrive_while_input_is_read():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPool(3) as pool:
            for _ in range(3):
                results = pool.imap_unordered(abs, range(10000), chunksize=1, lookahead=2000)
                assert sorted(results) == list(range(10000))
    finally:
        sys.setswitchinterval(interval)


def test_child_of_a_task_is_not_taken_for_a_worker():
    with make(2) as pool:
        assert pool.map(work.fork_and_come_out, range(20), 1) == list(range(20))
        assert pool.map(work.square, range(50), 1) == [n * n for n in range(50)]


def reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap])
def test_children_that_others_wait_for(handler):
    """Only their exit codes are lost."""
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with nothing_left():
            for _ in range(2):
                with make(2) as pool:
                    with pytest.raises(WorkerDiedError):
                        pool.apply(work.leave)
                    assert pool.map(work.square, range(9), 1) == [n * n for n in range(9)]
                    pool.close()
                    pool.join(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
