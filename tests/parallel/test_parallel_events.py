"""Any-of and all-of events, nested; waiting as for plain events."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwrap.parallel import AndEvent, OrEvent

# Nothing here takes long; a longer wait is a hang.
LONG_S = 60.0


class Waiter:
    def __init__(self, event: Any, timeout: float | None = LONG_S) -> None:
        self.results: list[bool] = []
        self._thread = threading.Thread(
            target=lambda: self.results.append(event.wait(timeout)), daemon=True
        )
        self._thread.start()

    def result(self) -> bool:
        self._thread.join(2 * LONG_S)
        assert self.results, "the thread waits for ever"
        return self.results[0]

    def is_waiting(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()


def leaves(count: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(count)]


def test_any_and_all() -> None:
    a, b = leaves(2)
    either, both = OrEvent(a, b), AndEvent(a, b)
    assert (either.is_set(), both.is_set()) == (False, False)
    a.set()
    assert (either.is_set(), both.is_set()) == (True, False)
    b.set()
    assert (either.is_set(), both.is_set()) == (True, True)
    a.clear()
    assert (either.is_set(), both.is_set()) == (True, False)


def test_set_and_clear_of_compounds_do_nothing() -> None:
    a = threading.Event()
    event = OrEvent(a)
    event.set()
    assert not event.is_set()
    assert not a.is_set()
    a.set()
    event.clear()
    assert event.is_set()


@pytest.mark.parametrize("kind", [OrEvent, AndEvent])
def test_other_types_are_refused(kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}.*got Condition"):  # type: ignore[attr-defined]
        kind(threading.Event(), threading.Condition())


@pytest.mark.parametrize("timeout", [None, LONG_S, 0, -1])
def test_wait_returns_at_once_if_the_event_is_set(timeout: float | None) -> None:
    a = threading.Event()
    a.set()
    assert Waiter(OrEvent(a, threading.Event()), timeout).result() is True
    assert Waiter(AndEvent(a, a), timeout).result() is True


@pytest.mark.parametrize("timeout", [0.02, 0, -1])
def test_wait_returns_false_after_its_time(timeout: float) -> None:
    a, b = leaves(2)
    a.set()
    assert AndEvent(a, b).wait(timeout) is False
    assert OrEvent(b).wait(timeout) is False


@pytest.mark.parametrize("timeout", [None, LONG_S])
def test_wait_ends_when_the_last_needed_member_is_set(timeout: float | None) -> None:
    a, b = leaves(2)
    both = Waiter(AndEvent(a, b), timeout)
    either = Waiter(OrEvent(a, b), timeout)
    assert either.is_waiting()
    a.set()
    assert either.result() is True
    assert both.is_waiting()
    b.set()
    assert both.result() is True


def test_nested_events() -> None:
    a, b, c, d = leaves(4)
    event = AndEvent(OrEvent(a, b), OrEvent(AndEvent(c, d), c), a)
    waiter = Waiter(event)
    b.set()
    c.set()
    assert waiter.is_waiting()
    assert not event.is_set()
    a.set()
    assert waiter.result() is True


class _Asked(threading.Event):
    """An event that counts calls of `is_set`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)

    def is_set(self) -> bool:
        self.asked.release()
        return super().is_set()


def test_a_short_set_wakes_waiting_threads() -> None:
    a, b = threading.Event(), _Asked()
    a.set()
    waiter = Waiter(AndEvent(OrEvent(b), a))
    # The waiter checks once before it registers and once afterwards.
    for _ in range(2):
        assert b.asked.acquire(timeout=LONG_S)
    b.set()
    b.clear()
    assert waiter.result() is True


def test_a_set_method_taken_before_the_compound_was_made_works() -> None:
    a = threading.Event()
    take_notice = a.set
    on_its_own = Waiter(a)
    assert on_its_own.is_waiting()
    together = Waiter(OrEvent(a))
    assert together.is_waiting()
    take_notice()
    assert together.result() is True
    assert on_its_own.result() is True


def test_a_signal_handler_may_set_the_event_of_its_own_thread() -> None:
    a = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: a.set())
    try:
        ident = threading.get_ident()
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(ident, signal.SIGUSR1))
        timer.start()
        assert OrEvent(a).wait(LONG_S) is True
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_members_do_not_keep_compounds_alive() -> None:
    a = threading.Event()
    event = OrEvent(AndEvent(a), a)
    assert event.wait(0.01) is False
    waiter = Waiter(OrEvent(event))
    a.set()
    assert waiter.result() is True
    reference = weakref.ref(event)
    del event, waiter
    gc.collect()
    assert reference() is None


def test_no_thread_is_forgotten_under_load() -> None:
    """Many threads wait for events while others set and clear the members in turn."""
    rounds = 150
    a, b, c = leaves(3)
    event = AndEvent(OrEvent(a, b), c)
    failures: list[int] = []
    barrier = threading.Barrier(6, timeout=LONG_S)

    def wait() -> None:
        for i in range(rounds):
            barrier.wait()
            if not event.wait(LONG_S):
                failures.append(i)
            barrier.wait()

    def flip(leaf: threading.Event) -> None:
        for _ in range(rounds):
            barrier.wait()
            leaf.set()
            barrier.wait()
            leaf.clear()

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    threads += [threading.Thread(target=flip, args=(leaf,), daemon=True) for leaf in (a, b, c)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
        assert not thread.is_alive()
    assert failures == []


TREES = st.recursive(
    st.integers(0, 3),
    lambda inner: st.tuples(st.sampled_from([OrEvent, AndEvent]), st.lists(inner, max_size=3)),
    max_leaves=8,
)


def made(tree: Any, members: list[threading.Event]) -> Any:
    if isinstance(tree, int):
        return members[tree]
    kind, inner = tree
    return kind(*(made(child, members) for child in inner))


def expected(tree: Any, members: list[threading.Event]) -> bool:
    if isinstance(tree, int):
        return members[tree].is_set()
    kind, inner = tree
    return (any if kind is OrEvent else all)([expected(child, members) for child in inner])


@settings(deadline=None, max_examples=60)
@given(tree=TREES, changes=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6))
def test_any_tree_follows_its_members(tree: Any, changes: list[tuple[int, bool]]) -> None:
    members = leaves(4)
    event = OrEvent(made(tree, members))
    for member in members:
        member.set()
    can_be_set = event.is_set()
    for member in members:
        member.clear()
    waiter = Waiter(event) if can_be_set else None
    for index, up in changes:
        (members[index].set if up else members[index].clear)()
        assert event.is_set() == expected(tree, members)
        assert event.wait(0) == event.is_set()
    for member in members:
        member.set()
    assert event.is_set() == can_be_set
    assert waiter is None or waiter.result() is True
