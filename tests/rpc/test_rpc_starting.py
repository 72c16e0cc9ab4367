"""Worlds under every launcher; members that are killed; processes left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from marks import slow
from ports import free_port
from worlds import catch_error, run_and_expect

from stepwrap.collectives import get_rank
from stepwrap.rpc import World, get_cur_name
from stepwrap.runner import launch

PROGRAM = """
import os, signal
from pathlib import Path
import torch, torch.distributed as dist
from stepwrap.rpc import World, get_cur_name

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"process_{rank}_{attempt}").write_text(str(os.getpid()))
with World(f"w{rank}") as world:
    group = world.create_rpc_group("all", world.get_members())
    if (attempt, rank) == ("0", os.environ["KILLED"]):
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    name = group.rpc_sync((world.rank + 1) % 3, get_cur_name)
    value = torch.ones(1)
    dist.all_reduce(value)
    Path(f"answer_{rank}").write_text(f"{name} of {int(value)}, attempt {attempt}")
    group.barrier()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def call_around(world: World) -> tuple[str, float]:
    """Call the next member and reduce over all; return both results."""
    group = world.create_rpc_group("all", world.get_members())
    name = group.rpc_sync((world.rank + 1) % world.world_size, get_cur_name)
    value = torch.tensor(float(world.rank))
    dist.all_reduce(value)
    group.barrier()
    return name, value.item()


def _start_by_launch() -> tuple[tuple[str, float], int]:
    with World(f"w{get_rank()}") as world:
        return call_around(world), os.getpid()


@pytest.mark.slow
def test_by_launch() -> None:
    results = launch(_start_by_launch, nproc=3)
    assert [answer for answer, _ in results.values()] == [("w1", 3.0), ("w2", 3.0), ("w0", 3.0)]
    assert not any(is_alive(pid) for _, pid in results.values())


@pytest.mark.parametrize("killed", ["0", *slow("2")])
@pytest.mark.slow
def test_by_torchrun_which_starts_all_again_when_one_is_killed(killed: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 3 --max-restarts 1"
    done = subprocess.run(
        [sys.executable, *torchrun.split(), "--monitor-interval", "0.1", "program.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=dict(os.environ) | {"KILLED": killed},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [(tmp_path / f"answer_{rank}").read_text() for rank in range(3)]
    assert answers == [f"w{rank} of 3, attempt 1" for rank in (1, 2, 0)]
    pids = [int(path.read_text()) for path in tmp_path.glob("process_*")]
    assert len(pids) == 6
    assert not any(is_alive(pid) for pid in pids)


def _start_by_spawn(rank: int, port: int, folder: Path) -> None:
    with World(f"w{rank}", rank, 3, dist_init_method=f"tcp://127.0.0.1:{port}") as world:
        name, total = call_around(world)
    (folder / f"{rank}").write_text(f"{name} {total} {os.getpid()}")


@pytest.mark.slow
def test_by_torch_multiprocessing(tmp_path: Path) -> None:
    mp.spawn(_start_by_spawn, (free_port(), tmp_path), nprocs=3)
    results = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [result[:2] for result in results] == [["w1", "3.0"], ["w2", "3.0"], ["w0", "3.0"]]
    assert not any(is_alive(int(pid)) for *_, pid in results)


def kill_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose(world: World, dead: str) -> dict[str, str]:
    """Kill a member; return the errors of calls and barriers."""
    group = world.create_rpc_group("all", world.get_members())
    sleeping = group.rpc_async(dead, time.sleep, args=(60,), timeout=0)
    group.barrier()
    if world.name == dead:
        time.sleep(60)
    if world.name == "w1":
        group.rpc_async(dead, kill_here)
    # Long enough that an error about a timeout means that the death went unnoticed.
    limit = 40
    return {
        "in flight": catch_error(sleeping.wait),
        "sync": catch_error(group.rpc_sync, dead, abs, limit, (1,)),
        "async": catch_error(group.rpc_async(dead, abs, limit, (1,)).wait),
        "barrier": catch_error(group.barrier, timeout=limit),
        "group": catch_error(world.create_rpc_group, "new", world.get_members(), timeout=limit),
    }


def _outlive(rank: int, port: int, dead: str, folder: Path) -> None:
    world = World(f"w{rank}", rank, 3, dist_init_method=f"tcp://127.0.0.1:{port}")
    errors = _lose(world, dead)
    if dead == "w0":
        errors["stop"] = catch_error(world.stop, timeout=40)
    else:
        living = world.create_rpc_group("living", ["w0", "w1"])
        assert living.rpc_sync(1 - rank, get_cur_name) == f"w{1 - rank}"
        world.stop()
    assert not world.started
    (folder / f"w{rank}").write_text(json.dumps(errors))


def run_and_lose(dead: str, folder: Path) -> list[dict[str, str]]:
    """Run three members and kill one; return the errors of the others."""
    names = [f"w{rank}" for rank in range(3)]
    codes = [-signal.SIGKILL if name == dead else 0 for name in names]
    run_and_expect(codes, _outlive, free_port(), dead, folder)
    return [json.loads((folder / name).read_text()) for name in names if name != dead]


@pytest.mark.slow
def test_errors_name_a_killed_member_and_the_others_keep_working(tmp_path: Path) -> None:
    for errors in run_and_lose("w2", tmp_path):
        barrier, group = errors.pop("barrier"), errors.pop("group")
        assert re.match("RpcError: barrier .*'all': 'w2' [^']*ended$", barrier)
        assert re.match("RpcError: group 'new': 'w2' [^']*ended$", group)
        for text in errors.values():
            assert re.match("RpcError: 'w2' .*gone or .*reached, ", text)


@pytest.mark.slow
def test_without_rank_zero_every_call_fails_at_once(tmp_path: Path) -> None:
    for errors in run_and_lose("w0", tmp_path):
        assert set(errors) == {"in flight", "sync", "async", "barrier", "group", "stop"}
        for text in errors.values():
            assert re.match("RpcError: 'w0' .*gone or .*reached, ", text)
