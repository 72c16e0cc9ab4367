"""Worlds: start, end and errors."""

import gc
import os
import pickle
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import run_ranks
from worlds import raised_by, rank_without_group

from stepwrap.rpc import (
    RpcError,
    World,
    get_cur_name,
    get_cur_rank,
    get_world,
    is_world_initialized,
)


def _meet(url: str, **options: Any) -> dict[str, Any]:
    rank = rank_without_group()
    assert not is_world_initialized()
    assert get_world() is None
    with World(f"w{rank}", rank, 3, dist_init_method=url, **options) as world:
        facts = {
            "map": world.rank_name_map,
            "ranks": world.get_ranks(),
            "members": world.get_members(),
            "me": (get_cur_rank(), get_cur_name(), world.name == f"w{rank}"),
            "is_current": get_world() is world and isinstance(world, World),
            "manager": world.lut_manager,
            "second": raised_by(World, "other", rank, 3, dist_init_method=url),
            "pickled": raised_by(pickle.dumps, world),
        }
        if dist.is_initialized():
            value = torch.tensor(float(rank))
            dist.all_reduce(value)
            facts["sum"] = value.item()
        group = raised_by(world.create_rpc_group, "g", ["w0"]) if options else None
        facts["group"] = group
    facts["after"] = (is_world_initialized(), dist.is_initialized(), world.started)
    world.stop()
    return facts


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_members_meet_by_an_address(scheme: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    for facts in run_ranks(_meet, 3, url):
        assert facts["map"] == {0: "w0", 1: "w1", 2: "w2"}
        assert facts["ranks"] == [0, 1, 2]
        assert facts["members"] == ["w0", "w1", "w2"]
        assert facts["me"][2]
        assert facts["is_current"]
        assert facts["manager"] == "w0"
        assert facts["sum"] == 3.0
        assert facts["second"][0] == "RuntimeError"
        assert "World could only be initialized once!" in facts["second"][1]
        assert facts["pickled"][0] == "RuntimeError"
        assert facts["after"] == (False, False, False)


def test_without_calls() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    for facts in run_ranks(_meet, 3, url, init_rpc=False):
        assert facts["members"] == ["w0", "w1", "w2"]
        assert facts["sum"] == 3.0
        kind, text = facts["group"]
        assert kind == "RuntimeError"
        assert "init_rpc=True, got init_rpc=False" in text


def _call_no_collectives(url: str) -> tuple[str, str]:
    rank = rank_without_group()
    with World(f"w{rank}", rank, 3, init_dist=False, dist_init_method=url) as world:
        assert not dist.is_initialized()
        group = world.create_rpc_group("g", world.get_members())
        assert group.rpc_sync(f"w{(rank + 1) % 3}", get_cur_rank) == (rank + 1) % 3
        answer = raised_by(world.create_collective_group, [0, 1])
        group.barrier()
    return answer


def test_without_collectives() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    for answer in run_ranks(_call_no_collectives, 3, url):
        assert answer[0] == "RuntimeError"
        assert "init_dist=False" in answer[1]


def _destroys_the_group() -> tuple[str, str]:
    with World(f"w{dist.get_rank()}") as world:
        dist.barrier()
        dist.destroy_process_group()
        return raised_by(world.create_collective_group, [0, 1])


def test_collectives_after_the_end_of_the_process_group() -> None:
    text = "collectives need the default process group, which was destroyed"
    assert run_ranks(_destroys_the_group, 2) == [("RuntimeError", text)] * 2


def _from_the_group() -> tuple[int, int, bool]:
    with World(f"w{dist.get_rank()}") as world:
        rank_and_size = world.rank, world.world_size
    return *rank_and_size, dist.is_initialized()


def test_takes_rank_and_size_of_the_process_group_and_leaves_it() -> None:
    assert run_ranks(_from_the_group, 2) == [(0, 2, True), (1, 2, True)]


def _from_the_environment(port: int) -> tuple[int, int]:
    rank = rank_without_group()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with World(f"w{rank}") as world:
        return world.rank - rank, world.world_size


def test_takes_rank_size_and_address_of_the_environment() -> None:
    results = run_ranks(_from_the_environment, 2, free_port())
    assert results == [(0, 2), (0, 2)]


def _what_is_left(port: int) -> list[tuple[int, int, int]]:
    rank = rank_without_group()
    remaining, before = [], _listeners()
    for _ in range(4):
        with World(f"w{rank}", rank, 2, dist_init_method=f"tcp://127.0.0.1:{port}") as world:
            group = world.create_rpc_group("g", world.get_members())
            assert group.remote("w1", abs, args=(-1,)).to_here() == 1
            if rank == 0:
                assert "'w1'" in raised_by(group.barrier, timeout=0.05)[1]
                group.pair("seen", True)
            while not group.is_paired("seen"):
                time.sleep(0.01)
            group.rpc_sync("w0", abs, args=(1,))
            group.barrier()
        del group, world
        gc.collect()
        handles = len(os.listdir("/proc/self/fd"))
        remaining.append((handles, threading.active_count(), _listeners() - before))
    return remaining


def _listeners() -> int:
    """Return how many sockets of this process listen."""
    sockets = {os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files()}
    rows = Path("/proc/self/net/tcp").read_text() + Path("/proc/self/net/tcp6").read_text()
    fields = [row.split() for row in rows.splitlines()]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in fields if len(row) > 9)


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_one_world_after_another_leaves_nothing() -> None:
    for remaining in run_ranks(_what_is_left, 2, free_port()):
        handles, threads, listeners = zip(*remaining, strict=True)
        # With the first world torch starts threads that it keeps until the process ends.
        assert handles[3] == handles[1]
        assert threads[3] == threads[1]
        assert listeners == (0, 0, 0, 0)


def _begin(
    names: list[str],
    sizes: list[int],
    port: int,
    ranks: list[int],
    *,
    init_rpc: bool = True,
    begin_s: float | list[float] = 20.0,
) -> tuple[str, str]:
    rank = rank_without_group()
    address = f"tcp://127.0.0.1:{port}"
    if names[rank] == "absent":
        return "", ""
    timeout_s = begin_s[rank] if isinstance(begin_s, list) else begin_s
    options = {"dist_init_method": address, "dist_timeout": timeout_s, "init_rpc": init_rpc}
    answer = raised_by(World, names[rank], ranks[rank], sizes[rank], **options)
    assert get_world() is None
    assert not dist.is_initialized()
    return answer


def test_two_members_with_one_name() -> None:
    answers = run_ranks(_begin, 3, ["a", "b", "a"], [3, 3, 3], free_port(), [0, 1, 2])
    text = "names must differ: ranks 0 and 2 are both called 'a'"
    assert answers == [("ValueError", text)] * 3


def test_other_world_sizes() -> None:
    answers = run_ranks(_begin, 2, ["a", "b"], [2, 3], free_port(), [0, 1])
    text = "world_size must be the same everywhere: it is 2 in rank 0 ('a'), 3 in rank 1 ('b')"
    assert answers == [("ValueError", text)] * 2


@pytest.mark.slow
def test_missing_members_are_named() -> None:
    # Long enough for the third process to start on a busy machine. Rank 0 gives up first and
    # lists the ranks that have joined.
    names, ranks = ["a", "absent", "c"], [0, 1, 2]
    answers = run_ranks(_begin, 3, names, [3, 3, 3], free_port(), ranks, begin_s=[4.0, 60.0, 60.0])
    for kind, text in (answers[0], answers[2]):
        assert kind == "RpcError"
        assert re.search(r" 3 ranks .* 4 s: 1; joined: 0 \('a'\), 2 \('c'\)$", text)


def test_rank_zero_is_missing() -> None:
    port = free_port()
    answers = run_ranks(_begin, 2, ["absent", "b"], [2, 2], port, [0, 1], begin_s=1.0)
    text = f"rank 0 has not opened the world at 127.0.0.1:{port} within 1 s"
    assert answers[1] == ("RpcError", f"{text}: Connection refused")


@pytest.mark.slow
def test_one_rank_twice() -> None:
    answers = run_ranks(
        _begin, 3, ["a", "b", "c"], [3, 3, 3], free_port(), [0, 1, 1], init_rpc=False, begin_s=4.0
    )
    assert sorted(kind for kind, _ in answers) == ["RpcError", "RpcError", "ValueError"]
    text = next(text for kind, text in answers if kind == "ValueError")
    assert re.match(r"rank 1 .*taken by '([bc])'.*'(?!\1)[bc]'", text)


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="rank must be in 0..1, got 2"):
        World("a", 2, 2)
    with pytest.raises(ValueError, match="must be given .*set RANK"):
        World("a")
    with pytest.raises(ValueError, match="must .*tcp://host:port, env:// or file:///path"):
        World("a", 0, 1, dist_init_method="udp://127.0.0.1:9000")
    with pytest.raises(ValueError, match="folder /absent/folder .*not exist"):
        World("a", 0, 1, dist_init_method="file:///absent/folder/store")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RpcError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            World("a", 0, 1, dist_init_method=f"tcp://127.0.0.1:{port}")
    with pytest.raises(RuntimeError, match="Distributed environment not initialized!"):
        get_cur_name()
    assert get_world() is None


def _late(port: int) -> float:
    rank = rank_without_group()
    world = World(f"w{rank}", rank, 2, dist_init_method=f"tcp://127.0.0.1:{port}")
    group = world.create_rpc_group("g", world.get_members())
    if rank == 0:
        # Rank 0 stops at once, but keeps answering calls.
        world.stop()
        return time.monotonic()
    time.sleep(0.5)
    assert group.rpc_sync("w0", abs, args=(-3,)) == 3
    called = time.monotonic()
    world.stop()
    return called


def test_stop_waits_until_all_members_stop() -> None:
    stopped, called = run_ranks(_late, 2, free_port())
    assert stopped >= called


def _waits_in_vain(port: int, over: Path) -> tuple[str, str] | None:
    rank = rank_without_group()
    world = World(f"w{rank}", rank, 2, dist_init_method=f"tcp://127.0.0.1:{port}")
    if rank == 0:
        answer = raised_by(world.stop, 0.3)
        assert get_world() is None
        over.touch()
        return answer
    while not over.exists():
        time.sleep(0.01)
    world.stop(graceful=False)
    return None


def test_stop_names_missing_members(tmp_path: Path) -> None:
    answer = run_ranks(_waits_in_vain, 2, free_port(), tmp_path / "over")[0]
    assert answer[0] == "RpcError"
    assert re.match(r"World\.stop\(\): 'w1' [^']*arrived .* 0\.3 s$", answer[1])


def _stops_without_a_limit(port: int, over: Path) -> bool:
    rank = rank_without_group()
    address = f"tcp://127.0.0.1:{port}"
    world = World(f"w{rank}", rank, 2, dist_init_method=address, rpc_timeout=0.5)
    if rank == 0:
        # The other one comes after the limit of a call.
        timer = threading.Timer(1.0, over.touch)
        timer.start()
        world.stop(timeout=0)
        timer.join()
        return get_world() is None
    while not over.exists():
        time.sleep(0.01)
    world.stop(30)
    return get_world() is None


def test_stop_without_a_limit(tmp_path: Path) -> None:
    ends = run_ranks(_stops_without_a_limit, 2, free_port(), tmp_path / "over")
    assert ends == [True, True]


def _leaves_by_an_error(port: int) -> tuple[str, str]:
    rank = rank_without_group()
    world = World(f"w{rank}", rank, 2, dist_init_method=f"tcp://127.0.0.1:{port}")
    group = world.create_rpc_group("g", world.get_members())
    if rank == 1:
        try:
            with world:
                group.barrier()
                raise KeyError("mine")
        except KeyError:
            return "", ""
    group.barrier()
    answer = raised_by(group.barrier, timeout=30)
    world.stop()
    return answer


def test_an_error_in_one_member_ends_barriers_of_the_others() -> None:
    answer = run_ranks(_leaves_by_an_error, 2, free_port())[0]
    assert answer[0] == "RpcError"
    assert re.match("barrier .*'g': 'w1' [^']*ended$", answer[1])


def _other_rank(port: int) -> tuple[str, str]:
    rank = rank_without_group()
    address = f"tcp://127.0.0.1:{port}"
    World(f"w{rank}", rank, 2, dist_init_method=address).stop()
    return raised_by(World, "w", 0, 1, dist_init_method=address) if rank else ("", "")


def test_a_process_keeps_its_rank() -> None:
    kind, text = run_ranks(_other_rank, 2, free_port())[1]
    assert kind == "ValueError"
    assert re.search("rank must be 1, .*got 0: ", text)


def _start_and_stop() -> None:
    with World(f"w{dist.get_rank()}") as world:
        world.create_rpc_group("g", world.get_members()).barrier()


def test_members_of_different_earlier_worlds_can_stop() -> None:
    for size in (2, 3, 2, 3, 4):
        # torch would wait for a key that the other members have numbered differently.
        run_ranks(_start_and_stop, size)
