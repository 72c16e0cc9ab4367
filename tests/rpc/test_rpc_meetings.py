"""Barriers and groups used by several threads, under reused names, and late."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from worlds import catch_error, let_go, run_group, wait_for_members

from stepwrap.rpc import RpcGroup, World
from stepwrap.rpc.calls import node as node_of
from stepwrap.rpc.calls.directory import Directory


def _two_threads(world: World, group: RpcGroup) -> list[str]:
    if world.rank != 0:
        wait_for_members(1)
        return []
    pair = [
        threading.Thread(target=lambda: answers.append(catch_error(group.barrier, timeout=1.5))),
        threading.Thread(target=lambda: answers.append(catch_error(group.barrier, timeout=0.3))),
    ]
    answers: list[str] = []
    for thread in pair:
        thread.start()
        time.sleep(0.2)
    for thread in pair:
        thread.join()
    group.rpc_sync("w1", let_go)
    return answers


@pytest.mark.slow
def test_no_thread_passes_a_barrier_because_another_gives_up() -> None:
    answers = run_group(_two_threads, 2)[0]
    for answer, timeout in zip(answers, ("0.3", "1.5"), strict=True):
        assert re.match(f"RpcError: barrier .*'all': 'w1' [^']* {timeout} s$", answer)


def _old_and_new(world: World, group: RpcGroup) -> Any:
    group.barrier()
    answer: list[str] = []
    old_group = world.create_rpc_group("pair", ["w0", "w1"])
    if world.rank == 1:
        waiting = threading.Thread(target=lambda: answer.append(catch_error(old_group.barrier)))
        waiting.start()
        time.sleep(0.3)
    old_group.destroy()
    if world.rank == 1:
        waiting.join()
    new_group = world.create_rpc_group("pair", ["w0", "w1"])
    if world.rank == 1:
        answer.append(catch_error(new_group.barrier, timeout=0.3))
        group.rpc_sync("w0", let_go)
    else:
        wait_for_members(1)
    new_group.barrier()
    return answer


def test_a_barrier_of_a_destroyed_group_does_not_match_its_successors() -> None:
    answer = run_group(_old_and_new, 2)[1]
    assert re.match("RuntimeError: .*'pair' .*destroyed in 'w1'", answer[0])
    assert re.match(r"RpcError: barrier .*'pair': 'w0' [^']* 0\.3 s$", answer[1])


def _one_is_late(world: World, group: RpcGroup) -> str:
    # The first two members begin to wait at the same time.
    group.barrier()
    if world.rank == 2:
        wait_for_members(1)
        group.barrier()
        return ""
    answer = catch_error(group.barrier, timeout=0.5 + 0.5 * world.rank)
    if world.rank == 1:
        group.rpc_sync("w2", let_go)
    group.barrier()
    return answer


def test_a_member_that_timed_out_is_not_reported_as_missing() -> None:
    answers = run_group(_one_is_late)
    for answer, timeout in zip(answers[:2], ("0.5", "1"), strict=True):
        assert re.match(f"RpcError: barrier .*'all': 'w2' [^']* {timeout} s$", answer)


@on_ranks(2)
def test_destroying_after_the_end_of_the_world() -> None:
    with World(f"w{dist.get_rank()}") as world:
        group = world.create_rpc_group("all", world.get_members())
    group.destroy()
    answer = catch_error(group.barrier)
    assert re.match("RuntimeError: .*must .*world with RPC", answer)


def _one_dies(reported: Path) -> str:
    world = World(f"w{dist.get_rank()}", rpc_timeout=20)
    group = world.create_rpc_group("all", world.get_members())
    group.barrier()
    if world.rank == 2:
        world.stop(graceful=False)
        return ""
    # Rank 1 comes late; rank 0 must not wait for it.
    while world.rank == 1 and not reported.exists():
        time.sleep(0.01)
    answer = catch_error(group.barrier)
    reported.touch()
    world.stop()
    return answer


def test_a_barrier_fails_at_once_if_a_member_is_dead(tmp_path: Path) -> None:
    error_0, second, _ = run_ranks(_one_dies, 3, tmp_path / "reported")
    assert error_0 == second
    assert re.match("RpcError: barrier .*'all': 'w2' [^']*ended$", error_0)


def _directory() -> Directory:
    directory = node_of.current().directory
    assert directory is not None
    return directory


def then_set(event: threading.Event, function: Any) -> Any:
    """Return `function` as a function that sets `event` at its end."""

    def wrapped(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            event.set()

    return wrapped


def _arrives_after_giving_up(world: World, group: RpcGroup) -> str:
    gave_up = threading.Event()
    if world.rank == 0:
        directory = _directory()
        meet, give_up = directory.meet, directory.give_up

        def late(meeting: Any, name: str, *args: Any) -> Any:
            if name == "w1":
                assert gave_up.wait(20)
            return meet(meeting, name, *args)

        directory.meet = late  # type: ignore[method-assign]
        directory.give_up = then_set(gave_up, give_up)  # type: ignore[method-assign]
        assert gave_up.wait(20)
    answer = catch_error(group.barrier, timeout=0.3 if world.rank else 0.5)
    # Otherwise the next barrier of rank 1 meets the barrier of rank 0.
    world.create_rpc_group("after", world.get_members())
    return answer


def test_an_arrival_that_is_served_after_giving_up_does_not_count() -> None:
    error_0, second = run_group(_arrives_after_giving_up, 2)
    assert re.match(r"RpcError: barrier .*'all': 'w1' [^']* 0\.5 s$", error_0)
    assert re.match(r"RpcError: barrier .*'all': 'w0' [^']* 0\.3 s$", second)


def _error_comes_late(world: World, group: RpcGroup) -> str:
    if world.rank == 1:
        return catch_error(world.create_rpc_group, "pair", ["w0", "w1"], timeout=0.5)
    directory = _directory()
    meet, give_up = directory.meet, directory.give_up
    arrived, gave_up = threading.Event(), threading.Event()

    def slow(meeting: Any, name: str, *args: Any) -> Any:
        answer = meet(meeting, name, *args)
        if name == "w1":
            arrived.set()
            assert gave_up.wait(20)
        return answer

    directory.meet = slow  # type: ignore[method-assign]
    directory.give_up = then_set(gave_up, give_up)  # type: ignore[method-assign]
    assert arrived.wait(20)
    return catch_error(world.create_rpc_group, "pair", ["w0"])


def test_a_member_that_gives_up_gets_the_error_of_the_meeting() -> None:
    error_0, second = run_group(_error_comes_late, 2)
    assert error_0 == second
    members = "'w0' [^']*members 'w0',[^']*'w1' [^']*members 'w0', 'w1'$"
    assert re.match(f"ValueError: {members}", error_0)
