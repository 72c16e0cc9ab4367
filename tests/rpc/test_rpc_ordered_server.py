"""The ordered server: chains of versions, in one process and from several."""

import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from worlds import ordered_server, run_group, run_world

from stepwrap.rpc import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    RpcGroup,
    World,
)


def test_a_new_key_takes_any_push() -> None:
    server = ordered_server(ignored=1)
    assert server._pull_service("key") is None
    assert server._push_service("key", "one", 1, "of nothing")
    assert server._pull_service("key") == ("one", 1)
    assert server._pull_service("key", 2) is None


def test_only_successors_of_the_newest_are_taken() -> None:
    server = ordered_server()
    assert server._push_service("key", "one", 1, None)
    assert not server._push_service("key", "other", 2, None)
    assert server._push_service("key", "two", 2, 1)
    assert not server._push_service("key", "late", 3, 1)
    assert server._push_service("other key", "one", 1, None)
    assert server._pull_service("key") == ("two", 2)
    assert server._pull_service("other key") == ("one", 1)


def test_versions_are_opaque() -> None:
    server = ordered_server()
    for version, previous in [(2, None), (-1, 2), ("a", -1), ((1, 2), "a")]:
        assert server._push_service("key", version, version, previous)
    assert server._pull_service("key") == ((1, 2), (1, 2))


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_versions_are_kept_behind_the_newest(depth: int) -> None:
    server = ordered_server(depth)
    for version in range(10):
        server._push_service("key", str(version), version, version - 1)
    versions = [version for version in range(10) if server._pull_service("key", version)]
    assert versions == list(range(10))[-depth - 1 :]
    assert server._pull_service("key", versions[0]) == (str(versions[0]), versions[0])


def test_the_same_version_is_replaced_in_place() -> None:
    server = ordered_server()
    for version, previous, value in [(1, None, "a"), (2, 1, "b"), (2, 2, "c")]:
        assert server._push_service("key", value, version, previous)
    assert server._pull_service("key") == ("c", 2)
    assert server._pull_service("key", 1) == ("a", 1)


def test_an_older_version_that_is_kept_cannot_come_again() -> None:
    server = ordered_server()
    server._push_service("key", "a", 1, None)
    server._push_service("key", "b", 2, 1)
    assert not server._push_service("key", "other", 1, 2)
    assert server._pull_service("key") == ("b", 2)
    assert server._pull_service("key", 1) == ("a", 1)


def test_wrong_arguments_of_a_server() -> None:
    with pytest.raises(AssertionError, match="belongs to"):
        ordered_server(is_member=False)
    for depth in (0, -1, 1.5):
        with pytest.raises(AssertionError, match="version_depth"):
            ordered_server(depth)
    with pytest.raises(TypeError, match="version_depth must .*positive integer, got '1'"):
        ordered_server("1")


_OPTIMIZED = """
import torch
from stepwrap.rpc.servers.reduction import ReduceSettings
from worlds import ordered_server, raised_by

for make, *args in (
    (ordered_server, 0),
    (ReduceSettings, "max", torch.device("cpu"), 2, 4, "block"),
    (ReduceSettings, "sum", torch.device("cpu"), 1, 4, "block"),
    (ReduceSettings, "sum", torch.device("cpu"), 4, 4, "block"),
):
    print(raised_by(make, *args)[0])
"""


@pytest.mark.slow
def test_arguments_are_checked_without_assert_statements() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", _OPTIMIZED],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.split() == ["AssertionError"] * 4


def test_the_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        OrderedServerBase()  # type: ignore[abstract]
    assert issubclass(OrderedServerSimple, OrderedServerBase)


def _share(world: World, group: RpcGroup) -> Any:
    rank = world.rank
    if rank == 0:
        OrderedServerSimpleImpl("server", group)
    group.barrier()
    server = group.get_paired("server").to_here()
    value = {"weight": torch.arange(3.0) + rank, "list": [rank]}
    accepted = server.push("key", value, 1, None)
    # Pushed and pulled values are copies.
    value["weight"].fill_(-1)
    group.barrier()
    pulled, version = server.pull("key")
    pulled_once = pulled["weight"].tolist(), list(pulled["list"]), version
    pulled["weight"].fill_(-1)
    pulled["list"].append(7)
    group.barrier()
    again = OrderedServerSimple("server", group).pull("key", 1)
    assert again is not None
    assert server.pull("no key") is None
    assert server.pull("key", 2) is None
    return accepted, pulled_once, (again[0]["weight"].tolist(), again[0]["list"], again[1])


def test_changes_of_pushed_and_pulled_values_are_not_shared() -> None:
    results = run_group(_share, 3)
    accepted, firsts, agains = zip(*results, strict=True)
    assert sorted(accepted) == [False, False, True]
    winner = accepted.index(True)
    assert set(map(str, firsts)) == {str(([winner + 0.0, winner + 1.0, winner + 2.0], [winner], 1))}
    assert firsts == agains


@run_world(3)
def test_a_name_is_taken_until_the_server_is_closed(world: World, group: RpcGroup) -> None:
    rank = world.rank
    if rank == 0:
        server = OrderedServerSimpleImpl("server", group)
        group.register("other/_pull_service", len)
    group.barrier()
    if rank == 1:
        for name in ("server", "other"):
            with pytest.raises(KeyError, match="already registered"):
                OrderedServerSimpleImpl(name, group)
        assert not group.is_registered("other/_push_service")
        assert not group.is_paired("other")
    accessor = group.get_paired("server").to_here()
    if rank == 1:
        assert accessor.push("key", "of the first", 1, None)
    group.barrier()
    if rank == 0:
        server.close()
        server.close()
        assert not group.is_paired("server")
    group.barrier()
    if rank == 2:
        with pytest.raises(KeyError, match="server"):
            accessor.pull("key")
        with pytest.raises(KeyError, match="nowhere"):
            OrderedServerSimple("nowhere", group).push("key", 1, 1, None)
    group.barrier()
    if rank == 2:
        OrderedServerSimpleImpl("server", group)
    group.barrier()
    # The old accessor finds the new server, which is empty.
    accessor.push(rank, "of the second", 1, None)
    assert (accessor.pull("key"), accessor.pull(rank)) == (None, ("of the second", 1))


@on_ranks(3)
def test_a_server_may_be_closed_after_its_group() -> None:
    with World(f"w{dist.get_rank()}") as world:
        group = world.create_rpc_group("all", world.get_members())
        server = OrderedServerSimpleImpl(f"server of {world.rank}", group)
        group.barrier()
        group.destroy()
        server.close()


def _count(world: World, group: RpcGroup) -> Any:
    rank = world.rank
    if rank == 0:
        OrderedServerSimpleImpl("server", group)
    group.barrier()
    server = group.get_paired("server").to_here()
    server.push("count", 0, 0, None)
    accepted = []

    def add(times: int) -> None:
        while times:
            value, version = server.pull("count")
            if server.push("count", value + 1, version + 1, version):
                accepted.append(version)
                times -= 1

    threads = [threading.Thread(target=add, args=(10,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.barrier()
    return accepted, server.pull("count")


def test_no_push_is_lost_between_threads_and_processes() -> None:
    results = run_group(_count, 3)
    assert [newest for _, newest in results] == [(90, 90)] * 3
    assert sorted(sum((accepted for accepted, _ in results), [])) == list(range(90))


class Counted:
    living: "weakref.WeakSet[Counted]" = weakref.WeakSet()

    def __init__(self) -> None:
        self.data = torch.zeros(1000)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.living.add(self)


def _living() -> int:
    return len(Counted.living)


@run_world(3)
def test_dropped_and_refused_values_are_freed(world: World, group: RpcGroup) -> None:
    rank = world.rank
    if rank == 0:
        OrderedServerSimpleImpl("server", group, version_depth=2)
    group.barrier()
    server = group.get_paired("server").to_here()
    for version in range(30):
        server.push(rank, Counted(), version, version - 1)
        server.push(rank, Counted(), "refused", "never")
    group.barrier()
    living: int = group.rpc_sync("w0", _living)
    assert living == 3 * 3
