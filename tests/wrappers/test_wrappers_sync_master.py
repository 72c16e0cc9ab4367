"""The protocol of masters and slaves: participants, replies, and the end of a wait."""

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from copy_threads import LIMIT_S, run_threads

from stepwrap.wrappers import FutureResult, ReplicationError, SlavePipe, SyncMaster

Pairs = list[tuple[int, Any]]


def scaled(messages: Pairs) -> Pairs:
    total = sum(message for _, message in messages)
    return [(identifier, (total, identifier)) for identifier, _ in messages]


def forward(master: SyncMaster, num_slaves: int, calls: int = 1) -> list[Any]:
    """Run one forward of a layer, whose slaves are deleted afterwards like copies."""
    pipes = [master.register_slave(i) for i in range(1, num_slaves + 1)]

    def slave(pipe: SlavePipe) -> list[Any]:
        return [pipe.run_slave(10 + call) for call in range(calls)]

    slaves = [lambda pipe=pipe: slave(pipe) for pipe in pipes]
    return run_threads([lambda: [master.run_master(call) for call in range(calls)], *slaves])


def test_a_forward_with_fewer_copies() -> None:
    """The number of slaves falls from two to none (a single chunk) and rises again."""
    master = SyncMaster(scaled, timeout_s=LIMIT_S)
    for num_slaves in (2, 1, 0, 3, 0, 0, 1):
        results = forward(master, num_slaves, calls=2)
        totals = [10 * num_slaves, 11 * num_slaves + 1]
        assert results == [
            [(total, identifier) for total in totals] for identifier in range(num_slaves + 1)
        ]
        assert master.nr_slaves == 0


def test_slaves_that_never_ran_are_forgotten() -> None:
    """A forward in eval mode registers copies but does not synchronise."""
    master = SyncMaster(scaled, timeout_s=LIMIT_S)
    unused = [master.register_slave(i) for i in (1, 2)]
    assert master.nr_slaves == 2
    del unused[:]
    assert forward(master, 1) == [[(10, 0)], [(10, 1)]]


def test_a_slave_may_come_first() -> None:
    master = SyncMaster(scaled, timeout_s=LIMIT_S)
    pipes = [master.register_slave(i) for i in (1, 2)]

    def run_late() -> Any:
        time.sleep(0.05)
        return master.run_master(1)

    results = run_threads([run_late, *(lambda p=pipe: p.run_slave(2) for pipe in pipes)])
    assert results == [(5, 0), (5, 1), (5, 2)]


def test_none_is_a_reply() -> None:
    master = SyncMaster(lambda messages: [(i, None) for i, _ in messages], timeout_s=LIMIT_S)
    assert forward(master, 2) == [[None]] * 3


@pytest.mark.parametrize(
    ("callback", "kind", "text"),
    [
        (lambda messages: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda messages: scaled(messages)[::-1], AssertionError, "first result should belongs"),
        (lambda messages: [], AssertionError, "first result should belongs"),
        (lambda messages: scaled(messages)[:2], ValueError, r"each of \[0, 1, 2\].* for \[0, 1\]"),
        (lambda messages: [*scaled(messages), (9, 9)], ValueError, r"for \[0, 1, 2, 9\]"),
    ],
)
def test_a_failing_callback(
    callback: Callable[[Pairs], Any], kind: type[Exception], text: str
) -> None:
    fails = [True]
    master = SyncMaster(
        lambda messages: callback(messages) if fails[0] else scaled(messages), timeout_s=LIMIT_S
    )
    for result in forward(master, 2):
        with pytest.raises(kind, match=text):
            raise result
    fails[0] = False
    assert forward(master, 0) == [[(0, 0)]]
    assert forward(master, 1) == [[(10, 0)], [(10, 1)]]


def test_a_slave_that_does_not_run() -> None:
    """The master times out, or raises if the slave's copy has been deleted."""
    master = SyncMaster(scaled, timeout_s=0.05)
    silent = master.register_slave(1)
    with pytest.raises(ReplicationError, match="copy 1"):
        master.run_master(1)
    with pytest.raises(ReplicationError):
        silent.run_slave(1)

    patient = SyncMaster(scaled, timeout_s=LIMIT_S)
    pipes = [patient.register_slave(i) for i in (1, 2)]
    run_threads([lambda: patient.run_master(1), *(lambda p=p: p.run_slave(1) for p in pipes)])
    del pipes[0]
    with pytest.raises(ReplicationError, match="copy 1 finished without reaching"):
        patient.run_master(1)


def test_a_master_that_does_not_run() -> None:
    master = SyncMaster(scaled, timeout_s=0.05)
    pipe = master.register_slave(7)
    with pytest.raises(ReplicationError, match=r"copy 0 .*not arrive .*timeout_s=0\.05"):
        pipe.run_slave(1)


def test_registering_while_a_slave_waits() -> None:
    master = SyncMaster(scaled, timeout_s=LIMIT_S)
    pipes = [master.register_slave(i) for i in (1, 2)]

    def register() -> None:
        time.sleep(0.05)
        try:
            master.register_slave(1)
        finally:
            pipes[1].run_slave(1)

    def run() -> Any:
        return [master.run_master(1), master.run_master(1)]

    def slave() -> Any:
        return [pipes[0].run_slave(1), pipes[0].run_slave(1)]

    results = run_threads([run, slave, lambda: [pipes[1].run_slave(1), register()]])
    with pytest.raises(AssertionError, match=r"Queue is not clean before next initialization\."):
        raise results[2]
    assert results[0] == [(3, 0), (3, 0)]


def test_a_new_replication_ends_the_old_one() -> None:
    master = SyncMaster(scaled, timeout_s=LIMIT_S)
    earlier_slave = master.register_slave(1)
    run_threads([lambda: master.run_master(1), lambda: earlier_slave.run_slave(1)])
    master.register_slave(1)
    with pytest.raises(ReplicationError, match="another replication"):
        earlier_slave.run_slave(1)
    with pytest.raises(ValueError, match="identifier must not be 0"):
        master.register_slave(0)


class Layer:
    """A layer whose master calls a method of the layer, like synchronised layers."""

    def __init__(self) -> None:
        self.offset = 0
        self.master = SyncMaster(self.answer, timeout_s=LIMIT_S)

    def answer(self, messages: Pairs) -> Pairs:
        return [(identifier, message + self.offset) for identifier, message in messages]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda master: pickle.loads(pickle.dumps(master))]
)
def test_copies_are_independent(duplicate: Callable[[Any], Any]) -> None:
    layer = Layer()
    pipe = layer.master.register_slave(1)
    twin = duplicate(layer)
    layer.offset = 100
    assert (layer.master.nr_slaves, twin.master.nr_slaves) == (1, 0)
    assert forward(twin.master, 1) == [[0], [10]]
    both = run_threads([lambda: layer.master.run_master(1), lambda: pipe.run_slave(2)])
    assert both == [101, 102]
    with pytest.raises(ReplicationError, match="slave 1 has no master"):
        duplicate(pipe).run_slave(1)
    assert duplicate(layer.master).nr_slaves == 0


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))]
)
def test_future_result(duplicate: Callable[[Any], Any]) -> None:
    future = FutureResult()
    for value in (None, 3):
        got = run_threads([lambda: future.get(LIMIT_S), lambda v=value: future.put(v)])
        assert got == [value, None]
    future.put(1)
    with pytest.raises(AssertionError, match="has not been fetched"):
        future.put(2)
    with pytest.raises(TimeoutError, match=r"timeout_s=0\.01"):
        duplicate(future).get(timeout_s=0.01)
    assert future.get() == 1
