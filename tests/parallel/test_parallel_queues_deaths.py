"""Queues when processes are killed, wait at the same time, or run out of descriptors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from pool_checks import wait_until
from queue_work import (
    count_until_none,
    descriptors,
    ended,
    get_for_ever,
    get_one_and_wait,
    get_with_few_descriptors,
    is_asleep,
    put_and_die,
    put_for_ever,
    served,
    started,
)

from stepwrap.parallel import MultiP2PQueue, SimpleP2PQueue, SimpleQueue, Thread, TimeoutError
from stepwrap.transport import descriptors as _descriptors

FORK = multiprocessing.get_context("fork")


def _killed(process: BaseProcess) -> None:
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


def test_a_reader_killed_while_it_waits_takes_nothing_along() -> None:
    queue: Any = SimpleQueue()
    readers = [started(FORK, get_for_ever, queue) for _ in range(2)]
    for reader in readers:
        wait_until(lambda: is_asleep(reader.pid))  # noqa: B023
    for reader in readers:
        _killed(reader)
    queue.put(1)
    assert queue.get(10) == 1


def test_get_gives_up_in_time_while_others_wait() -> None:
    queue: Any = SimpleQueue()
    reader = started(FORK, get_for_ever, queue)
    wait_until(lambda: is_asleep(reader.pid))
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        queue.get(0.1)
    assert time.monotonic() - begun < 10
    _killed(reader)


def test_a_killed_writer_leaves_only_whole_messages() -> None:
    queue: Any = SimpleQueue()
    back: Any = SimpleQueue()
    values = [bytes(20_000), bytes(200_000), 1]
    writers = [started(FORK, put_for_ever, queue, value) for value in values]
    for _ in range(100):
        assert queue.get(60) in values
    for writer in writers:
        _killed(writer)
    reader = started(FORK, count_until_none, queue, back)
    queue.put(None)
    assert all(value in values for value in back.get(60))
    assert ended(reader) == 0


def test_every_message_goes_to_exactly_one_reader() -> None:
    queue: Any = SimpleQueue()
    back: Any = SimpleQueue()
    readers = [started(FORK, count_until_none, queue, back) for _ in range(3)]
    for number in range(3000):
        queue.put(number)
    for _ in readers:
        queue.put(None)
    arrived = [back.get(60) for _ in readers]
    assert sorted(sum(arrived, [])) == list(range(3000))
    assert all(numbers == sorted(numbers) for numbers in arrived)
    assert [ended(reader) for reader in readers] == [0, 0, 0]


def test_values_of_a_dead_writer_arrive_before_the_end() -> None:
    queue: Any = SimpleP2PQueue()
    writer = started(FORK, put_and_die, queue, b"last words" * 10_000)
    assert queue.get(60) == b"last words" * 10_000
    with pytest.raises(EOFError):
        queue.get(60)
    assert ended(writer) == -signal.SIGKILL


@pytest.mark.parametrize("unread", [0, 3])
def test_put_to_a_dead_reader(unread: int) -> None:
    queue: Any = SimpleP2PQueue()
    back: Any = SimpleQueue()
    reader = started(FORK, get_one_and_wait, queue, back)
    queue.put(1)
    assert back.get(60) == 1
    os.kill(reader.pid or 0, signal.SIGSTOP)
    os.waitpid(reader.pid or 0, os.WUNTRACED)
    for number in range(unread):
        queue.put(number)
    _killed(reader)
    with pytest.raises(BrokenPipeError):
        queue.put(2)


def test_a_waiting_put_fails_when_its_reader_dies() -> None:
    queue: Any = SimpleP2PQueue()
    back: Any = SimpleQueue()
    reader = started(FORK, get_one_and_wait, queue, back)
    queue.put(1)
    assert back.get(60) == 1
    os.kill(reader.pid or 0, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (reader.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(OSError, match="Broken pipe|reset"):
        put_for_ever(queue, 1)
    killer.join()
    assert ended(reader) == -signal.SIGKILL


def test_the_sides_of_a_queue_for_two() -> None:
    queue: Any = SimpleP2PQueue()
    back: Any = SimpleQueue()
    reader = started(FORK, get_one_and_wait, queue, back)
    queue.put(1)
    with pytest.raises(OSError, match="puts into .*cannot get"):
        queue.get(1)
    assert back.get(60) == 1
    _killed(reader)


def test_multi_continues_with_the_living_processes() -> None:
    inbox, back = MultiP2PQueue(2), SimpleQueue()
    context = multiprocessing.get_context("spawn")
    readers = [started(context, get_one_and_wait, inbox.get_sub_queue(i), back) for i in (0, 1)]
    for number in (0, 1):
        inbox.put(number)
    assert {back.get(60), back.get(60)} == {0, 1}
    _killed(readers[0])
    inbox.put(2)
    assert ended(readers[1]) == 0
    with pytest.raises(BrokenPipeError, match="no process is left"):
        put_for_ever(inbox, 3)


def test_multi_put_fails_if_the_readers_of_all_open_queues_have_ended() -> None:
    queues = MultiP2PQueue(2)
    queues.get_sub_queue(0).close()
    context = multiprocessing.get_context("spawn")
    reader = started(context, get_one_and_wait, queues.get_sub_queue(1), SimpleQueue())
    queues.put(1)
    _killed(reader)
    putting = Thread(target=put_for_ever, args=(queues, 2), daemon=True)
    putting.start()
    putting.join(30)
    assert isinstance(getattr(putting.exception, "__cause__", None), BrokenPipeError)


def test_multi_get_ends_when_all_writers_have() -> None:
    queues = MultiP2PQueue(2)
    context = multiprocessing.get_context("spawn")
    for index in range(2):
        writer = started(context, put_and_die, queues.get_sub_queue(index), index)
        assert ended(writer) == -signal.SIGKILL
    assert sorted([queues.get(60), queues.get(60)]) == [0, 1]
    for _ in range(2):
        with pytest.raises(EOFError):
            queues.get(60)


@pytest.mark.parametrize(("count", "spare"), [(3, 0), (3, 1), (200, 2)])
def test_the_limit_of_open_files_is_named_by_the_receiver(count: int, spare: int) -> None:
    queue, back, reader = served(FORK, get_with_few_descriptors, spare)
    queue.put([torch.zeros(3) for _ in range(count)])
    name, text = back.get(60)
    assert name == "OSError"
    assert "ulimit -n" in text
    assert "set_sharing_strategy" in text
    assert ended(reader) == 0


def test_a_bundle_has_as_few_messages_as_possible() -> None:
    """The system limits the number of messages."""
    bundle = _descriptors.bundle([os.dup(0) for _ in range(600)])
    with socket.socket(fileno=bundle) as carrier:
        messages = [_descriptors.receive(carrier, 1)[1] for _ in range(4)]
    for message in messages:
        _descriptors.close(message)
    assert list(map(len, messages)) == [253, 253, 94, 0]


def test_more_tensors_than_a_message_takes_descriptors() -> None:
    before = descriptors()
    queue: Any = SimpleQueue()
    tensors = [torch.full((3,), float(number)) for number in range(600)]
    queue.put(tensors)
    arrived = queue.get(60)
    assert [tensor[0].item() for tensor in arrived] == list(range(600))
    assert all(
        sent.data_ptr() == other.data_ptr() for sent, other in zip(tensors, arrived, strict=True)
    )
    del queue, tensors, arrived
    wait_until(lambda: descriptors() <= before)
