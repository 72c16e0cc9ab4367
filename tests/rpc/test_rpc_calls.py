"""Calls that wait, fail, time out, or outnumber the threads of the process that serves them."""

import threading
import time
from typing import Any

import pytest
from worlds import raised_by, run_group, run_world

from stepwrap.rpc import RpcGroup, RpcReference, World, get_world


def own_group() -> RpcGroup:
    world = get_world()
    assert world is not None
    return world.groups["all"]


_gate = threading.Event()


def wait_at_gate() -> None:
    _gate.wait(20)


def call_what_waits() -> None:
    own_group().rpc_sync("w2", wait_at_gate, 0.3)


def _crowd(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        calls = [group.rpc_async("w1", call_what_waits) for _ in range(5)]
        text = "'w2' has not answered wait_at_gate() within 0.3 s"
        for kind, answer in [raised_by(call.wait) for call in calls]:
            assert kind == "RpcError"
            assert answer.startswith(text)
    group.barrier()
    # Lets the waiting calls finish before the world ends.
    _gate.set()


@pytest.mark.slow
def test_timeouts_arrive_while_all_threads_are_busy() -> None:
    run_group(_crowd, 3, rpc_threads=2)


_running: list[int] = []


def count_running() -> int:
    _running.append(1)
    most = len(_running)
    time.sleep(0.02)
    _running.pop()
    return most


def _many(world: World, group: RpcGroup) -> None:
    if world.rank == 0:
        calls = [group.rpc_async("w1", count_running) for _ in range(12)]
        assert max(call.wait() for call in calls) == 3
        mixed = [group.rpc_async("w1", [abs, own_group][n % 2], args=((),)) for n in range(8)]
        assert {raised_by(call.wait)[0] for call in mixed} == {"TypeError"}


def test_as_many_calls_run_at_once_as_there_are_threads() -> None:
    run_group(_many, 2, rpc_threads=3)


_executions: list[RpcReference] = []


def fetch(reference: RpcReference) -> Any:
    _executions.append(reference)
    return reference.to_here()


def fetch_by_service(reference: RpcReference) -> Any:
    _executions.append(reference)
    own_group().registered_async("fetch", (reference,)).wait()


def num_executions() -> int:
    return len(_executions)


@run_world(2)
def test_a_service_runs_once_whatever_it_raises(world: World, group: RpcGroup) -> None:
    if world.rank == 1:
        group.register("fetch", fetch)
        group.register("outer", fetch_by_service)
    else:
        group.pair("v", 1)
    group.barrier()
    if world.rank == 0:
        reference = group.get_paired("v")
        assert group.registered_sync("fetch", (reference,)) == 1
        group.unpair("v")
        for _ in range(2):
            with pytest.raises(KeyError, match="Value .v. not found") as raised:
                group.registered_sync("fetch", (reference,))
            assert type(raised.value).__name__ == "KeyError"
            with pytest.raises(KeyError, match="Value .v. not found"):
                group.registered_sync("outer", (reference,))
        assert group.rpc_sync("w1", num_executions) == 7
