"""Meetings of copies: replies, errors, missing copies and time limits."""

import copy
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from copy_threads import LIMIT_S, run_copies, run_threads

from stepwrap.wrappers import ReplicationError, ReplicationSession


def total(messages: list[int]) -> list[int]:
    return [sum(messages)] * len(messages)


def meeting(combine: Callable[[list[Any]], list[Any]] = total, layer: str = "bn") -> Any:
    """Return a forward that meets the other copies once with the message 1."""
    return lambda session, copy_id: session.rendezvous(layer.format(copy_id), copy_id, 1, combine)


@pytest.mark.parametrize("num_copies", [1, 2, 5])
def test_every_copy_gets_its_reply(num_copies: int) -> None:
    def forward(session: ReplicationSession, copy_id: int) -> list[Any]:
        ask = session.rendezvous
        return [
            ask("a", copy_id, copy_id, lambda messages: [10 * message for message in messages]),
            ask("a", copy_id, 1, total),
            ask("", copy_id, 2, total),
            ask("none", copy_id, None, lambda messages: messages),
        ]

    results = run_copies(ReplicationSession(num_copies, LIMIT_S), forward)
    assert results == [[10 * i, num_copies, 2 * num_copies, None] for i in range(num_copies)]


def test_combine_runs_once_and_outside_the_lock() -> None:
    calls = []

    def combine(messages: list[int]) -> list[int]:
        calls.append(messages)
        # This would hang on a lock that its caller holds.
        run_threads([lambda: session.finish(0)])
        return total(messages)

    session = ReplicationSession(3, LIMIT_S)
    forward = [lambda i=i: session.rendezvous("bn", i, i, combine) for i in range(3)]
    assert run_threads(forward) == [3, 3, 3]
    assert calls == [[0, 1, 2]]


class PickyError(Exception):
    """An error whose constructor takes other arguments than `args`."""

    def __init__(self, layer: str, *, value: float) -> None:
        super().__init__(f"{layer} got {value}")
        self.value = value


class PrefixingError(Exception):
    """An error whose constructor takes only a part of its text."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"no layer {layer}")


class StrangeError(Exception):
    """An error that cannot be constructed a second time."""

    def __new__(cls, *args: Any) -> "StrangeError":
        if args == ("twice",):
            raise RuntimeError
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__("twice")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad", 3), ValueError),
        (PickyError("bn", value=2.0), PickyError),
        (PrefixingError("bn"), PrefixingError),
        (KeyError("x"), KeyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeDecodeError),
        (StrangeError(), ReplicationError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_failing_copy_wakes_the_others(
    error: BaseException, expected: type[BaseException]
) -> None:
    def forward(session: ReplicationSession, copy_id: int) -> Any:
        if copy_id == 1:
            time.sleep(0.02)
            raise error
        return session.rendezvous("bn", copy_id, 0, total)

    results = run_copies(ReplicationSession(3, LIMIT_S), forward)
    assert results[1] is error
    for other in (results[0], results[2]):
        assert type(other) is expected
        assert other is not error
        assert other.__cause__ is error
        assert str(error) == str(other) or (
            expected is ReplicationError and str(error) in str(other)
        )
        assert vars(other) == ({} if expected is ReplicationError else vars(error))


def test_the_first_error_is_the_cause_of_all() -> None:
    """The error of copy 1 wakes copy 0, whose end does not hide it."""

    def forward(session: ReplicationSession, copy_id: int) -> Any:
        if copy_id == 1:
            raise ValueError("first")
        if copy_id == 2:
            # The other copies do not come: copies 0 and 1 are missing and have failed.
            time.sleep(0.1)
            return session.rendezvous("other", copy_id, 0, total)
        return session.rendezvous("bn", copy_id, 0, total)

    results = run_copies(ReplicationSession(3, LIMIT_S), forward)
    assert results[0].__cause__ is results[1]
    assert results[2].__cause__ is results[1]


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_copy_that_skips_the_layer(delay_s: float) -> None:
    def forward(session: ReplicationSession, copy_id: int) -> Any:
        session.rendezvous("bn1", copy_id, 0, total)
        if copy_id == 1:
            return "skipped"
        time.sleep(delay_s)
        return session.rendezvous("bn1", copy_id, 0, total)

    results = run_copies(ReplicationSession(3, LIMIT_S), forward)
    assert results[1] == "skipped"
    for index in (0, 2):
        assert type(results[index]) is ReplicationError
    texts = " ".join(str(results[index]) for index in (0, 2))
    assert re.search(r"copy 1 finished .*layer 'bn1' \(call 2\)", texts)


def test_copies_in_different_layers() -> None:
    """Neither copy ends, and neither can continue."""
    for result in run_copies(ReplicationSession(2, LIMIT_S), meeting(layer="bn{}")):
        with pytest.raises(ReplicationError, match=r"layer 'bn\d' \(call 1\).*same order"):
            raise result


def test_a_failing_combine() -> None:
    def combine(messages: list[int]) -> list[int]:
        raise PickyError("bn", value=float(sum(messages)))

    session = ReplicationSession(3, LIMIT_S)
    results = run_copies(session, meeting(combine))
    assert [(type(result), result.value) for result in results] == [(PickyError, 3.0)] * 3
    (origin,) = [result for result in results if result.__cause__ is None]
    assert all(result is origin or result.__cause__ is origin for result in results)
    with pytest.raises(PickyError):
        session.rendezvous("other", 0, 1, total)


def test_a_combine_with_too_few_replies() -> None:
    session = ReplicationSession(1, LIMIT_S)
    with pytest.raises(ValueError, match=r"module itself \(call 1\).*1 copies, got 0"):
        session.rendezvous("", 0, 1, lambda messages: [])


def test_abort_wakes_all_copies() -> None:
    session = ReplicationSession(3, LIMIT_S)
    error = OSError(5, "gone")

    def stop() -> None:
        time.sleep(0.02)
        session.abort(error)
        session.abort(ValueError("too late"))

    waiting = [lambda i=i: session.rendezvous("bn", i, 0, total) for i in range(2)]
    results = run_threads([*waiting, stop])[:2]
    with pytest.raises(OSError, match="gone") as later:
        session.rendezvous("bn", 2, 0, total)
    for result in (*results, later.value):
        assert type(result) is OSError
        assert result.__cause__ is error


def test_the_timeout_names_missing_copies() -> None:
    session = ReplicationSession(4, timeout_s=0.1)

    def forward(copy_id: int) -> Any:
        return session.rendezvous("bn1" if copy_id < 2 else "bn2", copy_id, 0, total)

    results = run_threads([lambda i=i: forward(i) for i in range(3)])
    for result in results:
        assert type(result) is ReplicationError
        assert "copy 3 (still running)" in str(result)
        assert "timeout_s=0.1" in str(result)
    assert sum(result.__cause__ is None for result in results) == 1


def test_a_slow_combine_is_waited_for() -> None:
    def combine(messages: list[int]) -> list[int]:
        time.sleep(0.8)
        return total(messages)

    # The copies must meet within the time, also on a busy machine.
    assert run_copies(ReplicationSession(2, timeout_s=0.5), meeting(combine)) == [2, 2]


def test_an_interrupt_of_a_waiting_copy() -> None:
    """The main thread waits; the other copies get the interrupt."""
    session = ReplicationSession(3, LIMIT_S)
    results: list[Any] = []

    def interrupt() -> None:
        time.sleep(0.1)
        # Send it to this thread, because a signal handled by another one does not wake it.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def other() -> None:
        try:
            results.append(session.rendezvous("bn", 1, 0, total))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (interrupt, other)]
    # Background processes of a shell ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt) as interrupted:
            session.rendezvous("bn", 0, 0, total)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threads:
        thread.join(LIMIT_S)
    assert [type(result) for result in results] == [KeyboardInterrupt]
    assert results[0].__cause__ is interrupted.value


def test_a_call_after_the_end() -> None:
    session = ReplicationSession(2, LIMIT_S)
    session.finish(0)
    with pytest.raises(ReplicationError, match="copy 0 calls layer 'bn' after"):
        session.rendezvous("bn", 0, 0, total)
    alone = ReplicationSession(1, LIMIT_S)
    alone.finish(0)
    assert alone.rendezvous("bn", 0, 7, total) == 7


def test_wrong_arguments() -> None:
    for arguments in ((0,), (2, 0), (2, -1.0), (2, float("nan"))):
        with pytest.raises(ValueError, match=r"num_copies must be|timeout_s must be"):
            ReplicationSession(*arguments)
    session = ReplicationSession(2, float("inf"))
    for call in (lambda: session.rendezvous("bn", 2, 0, total), lambda: session.finish(-1)):
        with pytest.raises(ValueError, match="copy_id must be from 0 to 1"):
            call()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))]
)
def test_copies_of_a_session_are_fresh(duplicate: Callable[[Any], Any]) -> None:
    session = ReplicationSession(2, LIMIT_S)
    session.abort(ValueError("old"))
    fresh = duplicate(session)
    assert (fresh.num_copies, fresh.timeout_s) == (2, LIMIT_S)
    assert run_copies(fresh, meeting()) == [2, 2]


def test_sessions_at_the_same_time_do_not_mix() -> None:
    sessions = [ReplicationSession(2, LIMIT_S) for _ in range(4)]

    def work(session: int, copy_id: int) -> list[int]:
        ask = sessions[session].rendezvous
        return [ask("bn", copy_id, session, total) for _ in range(20)]

    works = [lambda s=s, i=i: work(s, i) for s in range(4) for i in range(2)]
    assert run_threads(works) == [[2 * s] * 20 for s in range(4) for _ in range(2)]


class PlannedError(Exception):
    """An error raised on purpose by a copy or by `combine`."""


def _soaked(chance: random.Random, num_copies: int) -> tuple[str, list[int], Callable[..., Any]]:
    """Return the planned fault, the number of calls of each copy, and the copies' forward."""
    kind = chance.choice(["nothing", "copy", "skip", "extra", "combine"])
    calls = [chance.randint(1, 3)] * num_copies
    odd = chance.randrange(num_copies)
    at = chance.randint(1, calls[0])
    if kind == "skip":
        calls[odd] -= 1
    elif kind == "extra":
        calls[odd] += 1

    def forward(session: ReplicationSession, copy_id: int) -> list[int]:
        def combine(messages: list[int]) -> list[int]:
            if kind == "combine" and messages[0] == at:
                raise PlannedError
            return total(messages)

        replies = []
        for call in range(1, calls[copy_id] + 1):
            if kind == "copy" and (copy_id, call) == (odd, at):
                raise PlannedError
            replies.append(session.rendezvous("bn", copy_id, call, combine))
        return replies

    return kind, calls, forward


def test_soak() -> None:
    """1,000 sessions succeed or fail; none hangs, and no thread remains."""
    chance = random.Random(0)
    before = set(threading.enumerate())
    cases = set()
    for _ in range(1000):
        num_copies = chance.randint(1, 4)
        kind, calls, forward = _soaked(chance, num_copies)
        results = run_copies(ReplicationSession(num_copies, LIMIT_S), forward)
        cases.add((kind, num_copies))
        errors = [result for result in results if isinstance(result, BaseException)]
        if kind == "nothing" or (kind in ("skip", "extra") and num_copies == 1):
            assert results == [
                [num_copies * call for call in range(1, num_calls + 1)] for num_calls in calls
            ], kind
        elif kind in ("copy", "combine"):
            assert [type(result) for result in results] == [PlannedError] * num_copies
        else:
            expected = num_copies - 1 if kind == "skip" else 1
            assert [type(error) for error in errors] == [ReplicationError] * expected
    assert len(cases) == 20
    assert set(threading.enumerate()) == before
