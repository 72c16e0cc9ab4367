"""Kill processes of a gradient server, and check that no acknowledged push is lost.

Each world starts new processes: a primary reducer, two secondary reducers and several clients. In
most worlds one secondary reducer is killed at a random time; then each client is killed at a random
time. The managed model counts pushes: its parameter has an entry for each client, and each push of
a client adds one to that entry, by a step with learning rate 1 in float64. A client logs each push
before it is sent and after it is acknowledged. At the end no acknowledged push may be missing, and
each client may have one more, during which it was killed.

    python benchmarks/rpc_soak.py [--minutes 10] [--clients 4] [--seconds 6] [--seed 0]

Exits with 1 if a push was lost or applied twice.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import nn

from stepwrap.rpc import PushPullGradServer, PushPullGradServerImpl, World

REDUCERS = 3
BATCH = 2
WAIT_S = 120.0
# The pause between killing a reducer and clients, in which clients resend lost pushes.
PAUSE_S = 3.0


@dataclass
class Totals:
    """The results of all worlds."""

    worlds: int = 0
    client_kills: int = 0
    reducer_kills: int = 0
    acknowledged: int = 0
    applied: int = 0
    unanswered: int = 0
    wrong: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Counter(nn.Module):
    """A parameter with an entry for each client, and one for pushes that fill the last batches."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(clients + 1, dtype=torch.float64))


def push_one(client: PushPullGradServer, model: Counter, entry: int) -> None:
    model.counts.grad = torch.zeros_like(model.counts)
    model.counts.grad[entry] = -1
    client.push(model)


def until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:g} s for {description}")
        time.sleep(0.01)


def be_member(rank: int, clients: int, port: int, folder: Path) -> None:
    """Run a reducer or a client until it is killed or the file `end` exists."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    size = REDUCERS + clients
    url = f"tcp://127.0.0.1:{port}"
    with World(f"w{rank}", rank, size, dist_init_method=url, rpc_timeout=60) as world:
        group = world.create_rpc_group("all", world.get_members())
        server = PushPullGradServerImpl(
            "soak",
            group,
            primary_reducer="w0",
            secondary_reducers=["w1", "w2"],
            reduce_batch_size=BATCH,
        )
        model = Counter(clients)
        if rank == 0:
            server.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
        server.start()
        group.barrier()
        client = group.get_paired("soak").to_here()
        if rank >= REDUCERS:
            push_until_killed(client, rank - REDUCERS, clients, folder)
        until((folder / "end").exists, "the end")
        if rank == 0:
            fill_up(client, clients)
            torch.save(model.counts.detach(), folder / "counts.new")
            os.replace(folder / "counts.new", folder / "counts")
        # Skip the orderly end of the world, because members have been killed.
        until((folder / "counts").exists, "the count")
        os._exit(0)


def push_until_killed(client: PushPullGradServer, entry: int, clients: int, folder: Path) -> None:
    model = Counter(clients)
    begun = os.open(folder / f"begun_{entry}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    acknowledged = os.open(folder / f"acknowledged_{entry}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    while True:
        os.write(begun, b"x")
        push_one(client, model, entry)
        os.write(acknowledged, b"x")


def fill_up(client: PushPullGradServer, clients: int) -> None:
    """Push until all earlier pushes have been applied."""
    model = Counter(clients)
    # Each of two reducers may hold an incomplete batch, and the primary some more.
    for _ in range(16 * BATCH * BATCH):
        push_one(client, model, clients)


def measure_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run_world(totals: Totals, clients: int, seconds: float) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rpc_soak_") as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            spawn.Process(target=be_member, args=(rank, clients, port, folder))
            for rank in range(REDUCERS + clients)
        ]
        try:
            for process in processes:
                process.start()
            kill_at_random(totals, processes, folder, seconds)
            (folder / "end").touch()
            until((folder / "counts").exists, "the count")
            judge(totals, folder, clients)
        finally:
            for process in processes:
                process.kill()
                process.join()


def kill_at_random(
    totals: Totals, processes: list[BaseProcess], folder: Path, seconds: float
) -> None:
    victims = processes[REDUCERS:]
    logs = [folder / f"acknowledged_{entry}" for entry in range(len(victims))]
    until(lambda: all(measure_size(log) > 5 for log in logs), "the first pushes")
    started = time.monotonic()
    if random.random() < 0.75:
        time.sleep(random.uniform(0, seconds / 4))
        kill(random.choice(processes[1:REDUCERS]))
        totals.reducer_kills += 1
        time.sleep(PAUSE_S)
    times = sorted((random.uniform(0, seconds), index) for index in range(len(victims)))
    begun = time.monotonic()
    for when, index in times:
        time.sleep(max(0.0, begun + when - time.monotonic()))
        kill(victims[index])
        totals.client_kills += 1
    totals.rates.append(sum(map(measure_size, logs)) / (time.monotonic() - started))


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def judge(totals: Totals, folder: Path, clients: int) -> None:
    counts = torch.load(folder / "counts").tolist()
    for entry in range(clients):
        begun = measure_size(folder / f"begun_{entry}")
        acknowledged = measure_size(folder / f"acknowledged_{entry}")
        totals.acknowledged += acknowledged
        totals.applied += int(counts[entry])
        totals.unanswered += begun - acknowledged
        if not acknowledged <= counts[entry] <= begun:
            totals.wrong.append(
                f"world {totals.worlds}, client {entry}: {begun} begun, {acknowledged} "
                f"acknowledged, {counts[entry]:g} applied"
            )
    totals.worlds += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6, help="time in which clients are killed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    # Otherwise every process logs each broken connection.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    totals = Totals()
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        run_world(totals, options.clients, options.seconds)
    print(f"worlds                        {totals.worlds}")
    print(f"clients killed                {totals.client_kills}")
    print(f"secondary reducers killed     {totals.reducer_kills}")
    print(f"pushes acknowledged           {totals.acknowledged}")
    print(f"pushes without an answer      {totals.unanswered}")
    print(f"pushes applied                {totals.applied}")
    print(f"pushes per second, median     {statistics.median(totals.rates):.0f}")
    print(f"lost or applied twice         {len(totals.wrong)} clients")
    for line in totals.wrong:
        print(f"  {line}")
    sys.exit(bool(totals.wrong))


if __name__ == "__main__":
    main()
