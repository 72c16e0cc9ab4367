"""Gradient servers whose processes are killed: gradients are applied once and none is lost."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from ports import free_port
from torch import nn

from stepwrap.rpc import PushPullGradServer, PushPullGradServerImpl, RpcError, RpcGroup, World

WAIT_S = 120.0
Role = Callable[[PushPullGradServerImpl, RpcGroup, Path], Any]


class Counter(nn.Module):
    """A parameter with one entry for each client to count its pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(8, dtype=torch.float64))


def push_one(client: PushPullGradServer, model: Counter, entry: int) -> None:
    """Push a gradient that adds one to an entry at learning rate 1."""
    model.counts.grad = torch.zeros_like(model.counts)
    model.counts.grad[entry] = -1
    client.push(model)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.01)


def lines(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def note(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def applied(client: PushPullGradServer) -> torch.Tensor:
    answer = client.o_server.pull("model")
    return torch.zeros(8, dtype=torch.float64) if answer is None else answer[0]["counts"]


def run_role(rank: int, role: Role, size: int, port: int, folder: Path, options: Any) -> None:
    """Make the server, meet the other members and run the role of this rank."""
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}"
    limit = options.pop("rpc_timeout", 20)
    with World(f"w{rank}", rank, size, dist_init_method=url, rpc_timeout=limit) as world:
        group = world.create_rpc_group("all", world.get_members(), timeout=WAIT_S)
        server = PushPullGradServerImpl("server", group, reduce_batch_size=2, **options)
        if server.primary_reducer == world.name:
            model = Counter()
            server.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
        server.start()
        group.barrier(timeout=WAIT_S)
        role(server, group, folder)
        server.close()
        # Longer than a call may take, because the others may arrive late.
        world.stop(WAIT_S)


@contextlib.contextmanager
def members(roles: list[Role], folder: Path, **options: Any) -> Iterator[list[BaseProcess]]:
    """Run a world in processes that are killed at the end."""
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        spawn.Process(target=run_role, args=(rank, role, len(roles), port, folder, options))
        for rank, role in enumerate(roles)
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ends_well(processes: list[BaseProcess]) -> bool:
    for process in processes:
        process.join(WAIT_S)
    return [process.exitcode for process in processes] == [0] * len(processes)


def serve(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    until((folder / "end").exists)
    server.watch()


def push_before_and_after(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    """Push until a reducer is gone, and 100 times more."""
    client, model = group.get_paired("server").to_here(), Counter()
    pushes = after = 0
    # Together with the other client's 50 pushes a multiple of 4, so that all are applied.
    while after < 100 or pushes % 4 != 2:
        after += (folder / "is_gone").exists()
        push_one(client, model, 0)
        pushes += 1
        note(folder / "acknowledged")
    note(folder / "pushed")
    until(lambda: float(applied(client).sum()) >= pushes + 50)
    torch.save((applied(client), pushes), folder / "applied")
    note(folder / "end")


def push_50_and_wait(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    """Push before the kill only: gradients held by the dead reducer must be sent again."""
    client, model = group.get_paired("server").to_here(), Counter()
    for _ in range(50):
        push_one(client, model, 1)
        note(folder / "acknowledged_too")
    serve(server, group, folder)


@pytest.mark.slow
@pytest.mark.parametrize("secondaries", [["w1"], ["w1", "w2"]])
def test_a_dead_secondary_loses_nothing(secondaries: list[str], tmp_path: Path) -> None:
    """The other secondary takes over, or the primary's process if there is none."""
    roles = [serve, serve, serve, push_before_and_after, push_50_and_wait]
    with members(roles, tmp_path, secondary_reducers=secondaries) as processes:
        until(lambda: lines(tmp_path / "acknowledged_too") == 50)
        until(lambda: lines(tmp_path / "acknowledged") >= 20)
        processes[1].kill()
        note(tmp_path / "is_gone")
        assert ends_well([process for process in processes if process is not processes[1]])
        counts, pushes = torch.load(tmp_path / "applied")
    assert counts.tolist() == [pushes, 50.0, 0, 0, 0, 0, 0, 0]


def wait_for_exclusion(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    """Wait for the error by which a process that was frozen learns that it was excluded."""

    def has_failed() -> bool:
        try:
            server.watch()
        except RpcError as error:
            return "has excluded 'w1'" in str(error)
        return False

    until(has_failed)
    until((folder / "end").exists)


@pytest.mark.slow
def test_a_frozen_secondary_is_excluded(tmp_path: Path) -> None:
    """Its pushes have been applied by others when it wakes up; it cannot apply them again."""
    roles = [serve, wait_for_exclusion, serve, push_before_and_after, push_50_and_wait]
    options = {"secondary_reducers": ["w1", "w2"], "rpc_timeout": 5}
    with members(roles, tmp_path, **options) as processes:
        until(lambda: lines(tmp_path / "acknowledged_too") == 50)
        until(lambda: lines(tmp_path / "acknowledged") >= 20)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGSTOP)
        note(tmp_path / "is_gone")
        until((tmp_path / "pushed").exists)
        os.kill(processes[1].pid, signal.SIGCONT)
        assert ends_well(processes)
        counts, pushes = torch.load(tmp_path / "applied")
    assert counts.tolist() == [pushes, 50.0, 0, 0, 0, 0, 0, 0]


def push_for_ever(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    client, model = group.get_paired("server").to_here(), Counter()
    while True:
        push_one(client, model, 0)
        note(folder / "acknowledged")


def push_until_dead(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    """Push while another client is killed, then enough to complete the step of its last push."""
    client, model = group.get_paired("server").to_here(), Counter()
    pushes = 0
    while not (folder / "is_dead").exists():
        push_one(client, model, 1)
        pushes += 1
    for _ in range(4):
        push_one(client, model, 1)
    until(lambda: float(applied(client)[1]) > pushes)
    torch.save((applied(client), pushes + 4), folder / "applied")
    note(folder / "end")


@pytest.mark.slow
def test_a_dead_client_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    roles = [serve, serve, push_for_ever, push_until_dead]
    with members(roles, tmp_path, secondary_reducers=["w1"]) as processes:
        until(lambda: lines(tmp_path / "acknowledged") >= 50)
        processes[2].kill()
        processes[2].join()
        note(tmp_path / "is_dead")
        assert ends_well([processes[0], processes[1], processes[3]])
        counts, pushes = torch.load(tmp_path / "applied")
    acknowledged = lines(tmp_path / "acknowledged")
    # It may have been killed between the reducer's answer and its own note.
    assert counts[0] in (acknowledged, acknowledged + 1)
    assert pushes - 4 < counts[1] <= pushes


def push_until_error(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    client, model = group.get_paired("server").to_here(), Counter()
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            push_one(client, model, 0)
            note(folder / "acknowledged")
    except RpcError as error:
        (folder / f"error_{group.get_cur_name()}").write_text(
            f"{time.monotonic() - started:.3f} {error}"
        )
    is_accepted = False
    with contextlib.suppress(RpcError):
        client.push(model)
        is_accepted = True
    assert not is_accepted
    note(folder / f"done_{group.get_cur_name()}")
    os._exit(0)


def watch_until_error(server: PushPullGradServerImpl, group: RpcGroup, folder: Path) -> None:
    def has_failed() -> bool:
        try:
            server.watch()
        except RpcError:
            return True
        return False

    until(has_failed)
    until(lambda: (folder / "done_w2").exists() and (folder / "done_w3").exists())
    os._exit(0)


@pytest.mark.parametrize("primary", [1, *slow(0)])
@pytest.mark.slow
def test_every_client_raises_if_the_primary_dies(primary: int, tmp_path: Path) -> None:
    """Also if the primary is rank 0, which keeps the tables of all groups."""
    roles: list[Role] = [watch_until_error] * 2 + [push_until_error] * 2
    options = {"primary_reducer": f"w{primary}", "secondary_reducers": [f"w{1 - primary}"]}
    with members(roles, tmp_path, **options) as processes:
        until(lambda: lines(tmp_path / "acknowledged") >= 20)
        processes[primary].kill()
        assert ends_well([process for process in processes if process is not processes[primary]])
    for name in "w2", "w3":
        seconds, text = (tmp_path / f"error_{name}").read_text().split(" ", 1)
        assert float(seconds) < 20
        assert "server" in text or f"w{primary}" in text
