"""Queues within one process, and between processes of each start method."""

from __future__ import annotations

import builtins
import gc
import multiprocessing
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
from queue_work import descriptors, echo, ended, get_modules, put_all, served, started

from stepwrap.parallel import MultiP2PQueue, SimpleP2PQueue, SimpleQueue, TimeoutError

METHODS = ["spawn", "fork", "forkserver"]
ANY = pytest.mark.parametrize(
    "make", [SimpleQueue, SimpleP2PQueue, lambda: MultiP2PQueue(2)], ids=["any", "p2p", "multi"]
)


@ANY
def test_in_order_within_one_process(make: Any) -> None:
    queue = make()
    assert queue.empty()
    values = [None, 1, "two", [3.0], {"four": (5,)}, b"6" * 100_000, lambda: 7]
    for value in values:
        queue.put(value)
        assert not queue.empty()
        arrived = queue.get(1)
        assert arrived() == 7 if callable(value) else arrived == value
    queue.quick_put(1)
    assert queue.quick_get() == 1
    assert queue.empty()


@ANY
def test_get_gives_up_in_time(make: Any) -> None:
    queue = make()
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError, match=f"nothing arrived .* {timeout} s") as raised:
            queue.get(timeout)
        assert isinstance(raised.value, multiprocessing.TimeoutError)
        assert isinstance(raised.value, builtins.TimeoutError)
    queue.put(1)
    assert queue.get(0) == 1


@ANY
def test_a_timeout_that_makes_no_sense(make: Any) -> None:
    with pytest.raises(ValueError, match="timeout must .*None .* 0 s, got -1"):
        make().get(-1)


@ANY
def test_closed_queues_raise(make: Any) -> None:
    queue = make()
    queue.put(1)
    queue.close()
    queue.close()
    for use in (queue.get, queue.empty, lambda: queue.put(1), lambda: queue.get(1)):
        with pytest.raises(OSError, match="closed in this process"):
            use()


@ANY
def test_only_a_starting_process_gets_the_queue(make: Any) -> None:
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(make())


def test_number_of_queues() -> None:
    for wrong in ("2", 1.5, True):
        with pytest.raises(TypeError, match="queue_num must .*whole number, got"):
            MultiP2PQueue(wrong)
    for queue in (SimpleQueue(), SimpleP2PQueue(), MultiP2PQueue(1)):
        with pytest.raises(TypeError, match="timeout must .*seconds .*None, got '1'"):
            queue.get("1")
    with pytest.raises(ValueError, match="queue_num must .* 1, got 0"):
        MultiP2PQueue(0)


def test_a_value_that_cannot_be_pickled_leaves_the_queue_usable() -> None:
    queue = SimpleQueue()
    with pytest.raises(TypeError, match="cannot pickle"):
        queue.put([bytes(100_000), threading.Lock()])
    queue.put(1)
    assert queue.get(1) == 1


def test_nothing_stays_open() -> None:
    # Collect the cycles of earlier tests now, not in the middle of this one.
    gc.collect()
    before = descriptors()
    for large in (b"1" * 100_000, np.zeros(100_000), [1] * 50_000):
        queue = SimpleQueue()
        queue.put(large)
        queue.put(large)
        arrived = queue.get()
        del queue
        assert descriptors() == before, type(arrived)


def test_put_waits_for_room() -> None:
    queue = SimpleQueue()
    numbers = list(range(2000))
    thread = threading.Thread(target=put_all, args=(queue, numbers))
    thread.start()
    assert [queue.get(10) for _ in numbers] == numbers
    thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_to_and_fro(method: str) -> None:
    context = multiprocessing.get_context(method)
    inbox: Any = SimpleQueue(ctx=context)
    back: Any = SimpleP2PQueue()
    process = started(context, echo, inbox, back)
    large = np.arange(200_000.0)
    for value in (1, {"a": [2]}, b"3" * 300_000):
        inbox.put(value)
        assert back.get(60) == value
    inbox.put((large, large[5:]))
    array, other = back.get(60)
    assert np.array_equal(array, large)
    assert np.array_equal(other, large[5:])
    array += 1
    inbox.put(None)
    assert ended(process) == 0
    with pytest.raises(EOFError, match="no other process can put"):
        back.get(60)


def test_torch_is_not_imported_for_other_values() -> None:
    context = multiprocessing.get_context("spawn")
    inbox, back, process = served(context, get_modules)
    inbox.put(np.zeros(100_000))
    value, has_torch, has_cloudpickle = back.get(60)
    assert (len(value), has_torch, has_cloudpickle) == (100_000, False, False)
    assert ended(process) == 0


def test_connections_can_be_sent() -> None:
    ours, theirs = multiprocessing.Pipe()
    inbox, back, process = served(multiprocessing.get_context("fork"), echo)
    inbox.put(theirs)
    arrived = back.get(60)
    arrived.send("through")
    assert ours.poll(30)
    assert ours.recv() == "through"
    inbox.put(None)
    assert ended(process) == 0


def test_multi_put_uses_the_shortest_queue() -> None:
    queues = MultiP2PQueue(3)
    for _ in range(10):
        queues.get_sub_queue(1).put("busy")
    for number in range(6):
        queues.put(number)
    assert [queues.get_sub_queue(0).get(1) for _ in range(3)] == [0, 2, 4]
    assert [queues.get_sub_queue(2).get(1) for _ in range(3)] == [1, 3, 5]


def test_multi_put_passes_over_full_queues() -> None:
    queues = MultiP2PQueue(2)
    for number in range(400):
        queues.put(number)
    thread = threading.Thread(target=put_all, args=(queues, list(range(400, 1000))))
    thread.start()
    arrived = [queues.get(10) for _ in range(1000)]
    thread.join()
    assert sorted(arrived) == list(range(1000))


def test_multi_get_is_fair() -> None:
    queues = MultiP2PQueue(3)
    for index in range(3):
        put_all(queues.get_sub_queue(index), [index] * 4)
    assert [queues.get(1) for _ in range(12)] == [0, 1, 2] * 4


def test_get_is_woken_by_a_put() -> None:
    queue = MultiP2PQueue(2)
    timer = threading.Timer(0.1, queue.get_sub_queue(1).put, (5,))
    timer.start()
    begun = time.monotonic()
    assert queue.get(60) == 5
    assert time.monotonic() - begun < 25
    timer.join()
