"""Calls that are interrupted or have slow input do not block other calls."""

import itertools
import queue
import threading
import time

import pool_work as work
import pytest
from pool_checks import KINDS

from stepwrap.parallel import Pool, ThreadPool, TimeoutError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=KINDS)
def pool(request):
    with KINDS[request.param]() as pool:
        yield pool


def test_arguments_that_are_none(pool):
    """The caller gets the error, and `join` does not wait for the call."""
    with pytest.raises(TypeError, match="not iterable"):
        pool.apply_async(work.square, 5)
    with pytest.raises((TypeError, ValueError)):
        pool.apply_async(work.square, (5,), "keywords")
    assert pool.apply(work.square, (5,)) == 25
    pool.close()
    pool.join(60)


class Interrupted(Pool):
    """A pool in which sending the third task raises KeyboardInterrupt."""

    puts = 0

    def pool_inqueue_put(self, task):
        """Put a task."""
        self.puts += 1
        if self.puts == 3:
            raise KeyboardInterrupt
        super().pool_inqueue_put(task)


CALLS = {
    "map": lambda pool: pool.map(work.square, range(9), 1),
    "starmap": lambda pool: pool.starmap(work.square, [(n,) for n in range(9)], 1),
    "imap": lambda pool: pool.imap(work.square, range(9)),
    "apply": lambda pool: [pool.apply_async(work.square, (n,)) for n in range(9)],
}


@pytest.mark.parametrize("call", CALLS)
def test_interrupted_while_tasks_are_handed_over(call):
    """The caller has no result, so nothing waits for the tasks that were not sent."""
    with Interrupted(1, start_method="fork") as pool:
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](pool)
        assert pool.map(work.square, range(5), 1) == [0, 1, 4, 9, 16]
        pool.close()
        pool.join(60)


def test_interrupted_in_the_input(pool):
    """The error is raised when it is read; earlier results can still be taken."""

    def numbers():
        yield from range(3)
        raise KeyboardInterrupt

    # `imap` itself may return first, because results can come before the next input is read.
    with pytest.raises(KeyboardInterrupt):
        list(pool.imap(work.square, numbers()))
    iterator = pool.imap(work.square, numbers(), lookahead=2)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == [4]
    pool.close()
    pool.join(60)


@pytest.mark.parametrize("method", ["imap", "imap_unordered"])
def test_slow_input_does_not_hold_up_results(pool, method):
    consumed = []

    def numbers():
        for number in range(1000):
            consumed.append(number)
            yield number
            time.sleep(0.02)

    iterator = getattr(pool, method)(work.square, numbers(), lookahead=1000)
    assert next(iterator) in {n * n for n in consumed}
    assert len(consumed) < 1000
    iterator.next(timeout=60)
    assert len(consumed) < 1000


@pytest.mark.parametrize("method", ["imap", "imap_unordered"])
def test_slow_input_does_not_hold_up_a_time_out(method):
    consumed = []
    may_end = threading.Event()

    def numbers():
        for number in range(1000):
            consumed.append(number)
            yield number
            time.sleep(0.02)

    with ThreadPool(2) as pool:
        iterator = getattr(pool, method)(
            lambda number: number == 0 or may_end.wait(60), numbers(), lookahead=1000
        )
        assert next(iterator) is True
        with pytest.raises(TimeoutError):
            iterator.next(timeout=0.05)
        assert len(consumed) < 1000
        may_end.set()
        assert next(iterator) is True


def test_slow_input_is_read_item_by_item(pool):
    """Between the items of a chunk, the deadline and available results are checked."""
    consumed = []

    def numbers():
        for number in range(25):
            time.sleep(0.02)
            consumed.append(number)
            yield number

    iterator = pool.imap(work.square, numbers(), 5)
    with pytest.raises(TimeoutError):
        iterator.next(timeout=0)
    assert len(consumed) == 1
    assert next(iterator) == 0
    count = len(consumed)
    assert next(iterator) == 1
    assert len(consumed) == count + 1
    assert list(iterator) == [n * n for n in range(2, 25)]


def test_tasks_of_a_list_begin_at_once():
    begun = threading.Event()
    with ThreadPool(1) as pool:
        iterator = pool.imap(lambda event: event.set(), [begun])
        assert begun.wait(20)
        assert list(iterator) == [None]


def test_join_reads_as_far_ahead_as_allowed():
    """Within its timeout, and again from there."""
    consumed = []
    may_end = threading.Event()

    def numbers():
        for number in range(300):
            consumed.append(number)
            yield number

    with ThreadPool(2) as pool:
        iterator = pool.imap(lambda number: may_end.wait(60) and number, numbers(), 3, lookahead=6)
        pool.close()
        with pytest.raises(TimeoutError, match=r"have not ended within 0\.05 s"):
            pool.join(0.05)
        assert len(consumed) <= 6
        may_end.set()
        pool.join(60)
        assert list(iterator) == list(range(300))


def test_join_of_an_endless_input(pool):
    iterator = pool.imap(work.square, itertools.count())
    pool.close()
    with pytest.raises(TimeoutError, match=r"have not ended within 0\.05 s"):
        pool.join(0.05)
    assert [next(iterator) for _ in range(50)] == [n * n for n in range(50)]


def test_join_in_a_callback():
    """It raises, because only its thread could deliver the results for which it would wait."""
    errors = queue.SimpleQueue()

    def join(_):
        try:
            pool.join()
        except RuntimeError as error:
            errors.put(error)

    may_end = threading.Event()
    with ThreadPool(2) as pool:
        iterator = pool.imap(work.square, iter(range(9)), lookahead=1)
        pool.apply_async(may_end.wait, (60,), callback=join)
        pool.close()
        may_end.set()
        assert "callback cannot join" in str(errors.get(timeout=60))
        assert list(iterator) == [n * n for n in range(9)]


@pytest.mark.parametrize("method", ["imap", "imap_unordered"])
def test_stop_iteration_of_a_task_does_not_end_the_results(pool, method):
    """Otherwise the rest would be lost silently."""
    iterator = getattr(pool, method)(work.exhausted_at_3, [3, 3])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("method", ["map_async", "imap", "imap_unordered"])
def test_progress_counts_items_and_ends_with_the_pool(method, capsys):
    """The last chunk has a single item."""
    may_end = threading.Event()

    def wait(number):
        return number == 2 or may_end.wait(60)

    # A longer name would hide the percentage.
    wait.__qualname__ = "wait"
    with ThreadPool(2) as pool:
        getattr(pool, method)(wait, range(3), 2, progress=True)
        # It comes after the result of the last chunk.
        assert pool.apply(work.square, (3,)) == 9
        pool.terminate()
        assert "33%" in capsys.readouterr().out
        may_end.set()


@pytest.mark.parametrize("count", [3, 30])
def test_progress_ends_with_the_pool_if_no_task_runs(pool, count, capsys):
    iterator = pool.imap(work.square, iter(range(count)), lookahead=3, progress=True)
    assert next(iterator) == 0
    assert pool.map(work.square, range(6), 1) == [n * n for n in range(6)]
    pool.terminate()
    assert "imap(square)" in capsys.readouterr().out
