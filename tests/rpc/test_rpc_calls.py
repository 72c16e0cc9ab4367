"""Calls that wait, break, are late, or are more than a process serves at once."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from worlds import told

from stepwrap.rpc import RpcGroup, RpcReference, World, get_world

Body = Callable[[World, RpcGroup], Any]


def _in_group(body: Body, threads: int) -> Any:
    with World(f"w{dist.get_rank()}", rpc_timeout=20, rpc_threads=threads) as world:
        group = world.create_rpc_group("all", world.get_members())
        result = body(world, group)
        group.barrier()
    return result


def in_group(body: Body, size: int = 2, threads: int = 16) -> list[Any]:
    """Run on every rank, in a group of all, and meet at the end."""
    return run_ranks(_in_group, size, body, threads)


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
        for kind, answer in [told(call.wait) for call in calls]:
            assert kind == "RpcError"
            assert answer.startswith(text)
    group.barrier()
    # What still waits is served before the end of the world.
    _gate.set()


def test_a_process_full_of_services_that_call_still_hears_time_outs() -> None:
    in_group(_crowd, 3, threads=2)


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
        assert {told(call.wait)[0] for call in mixed} == {"TypeError"}


def test_so_many_calls_run_at_once_and_the_others_have_their_turn() -> None:
    in_group(_many, threads=3)


_executions: list[RpcReference] = []


def fetch(reference: RpcReference) -> Any:
    _executions.append(reference)
    return reference.to_here()


def fetch_by_service(reference: RpcReference) -> Any:
    _executions.append(reference)
    own_group().registered_async("fetch", (reference,)).wait()


def num_executions() -> int:
    return len(_executions)


def _missing(world: World, group: RpcGroup) -> None:
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


def test_a_service_runs_once_whatever_it_raises() -> None:
    in_group(_missing)
