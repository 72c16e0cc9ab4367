"""Kill workers of pools at random, and check that no task is lost and no resource leaks.

Rounds of tasks run through Pool and P2PPool in turn while a thread sends SIGKILL to workers. With
`retries` every task must return its value. Without, each task returns its value or raises
WorkerDiedError, and there must not be more errors than kills. At the end, open files, processes,
threads and shared memory must be as at the start.

    python benchmarks/pools_soak.py [--tasks 100000] [--workers 2] [--pause 0.1]
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from stepwrap.parallel import P2PPool, Pool, WorkerDiedError

ROUND = 10_000
START_S = 0.2


def work(number: int) -> int:
    """Return three times the number; every tenth task is slow, so that kills hit running tasks."""
    if number % 10 == 0:
        time.sleep(0.002)
    return 3 * number


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


def own_workers(min_age_s: float = 0.0) -> list[int]:
    """Return the ids of the processes that this one started, as found in /proc."""
    pids = []
    now = float(Path("/proc/uptime").read_text().split()[0])
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            age_s = now - int(status[19]) / os.sysconf("SC_CLK_TCK")
            is_own = int(status[1]) == os.getpid() and b"resource_tracker" not in command
            if is_own and age_s >= min_age_s:
                pids.append(int(entry.name))
    return pids


def count_all() -> dict[str, int]:
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "processes": len(own_workers()),
        "threads": threading.active_count(),
        "shared memory": len(os.listdir("/dev/shm")),
    }


class Killer(threading.Thread):
    """Kills a worker about every `pause_s` seconds until stopped."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.kills = 0
        self._pause_s = pause_s
        self._over = threading.Event()

    def run(self) -> None:
        chance = random.Random(0)
        while not self._over.wait(chance.uniform(0.5, 1.5) * self._pause_s):
            # Spare workers that are just starting: three dead ones in a row break the pool.
            workers = own_workers(START_S)
            if workers:
                try:
                    os.kill(chance.choice(workers), signal.SIGKILL)
                    self.kills += 1
                except ProcessLookupError:
                    pass

    def stop(self) -> None:
        self._over.set()
        self.join()


def run_round(pool: Pool, start: int, count: int, counts: Counter[str]) -> None:
    numbers = range(start, start + count)
    tensors = {n: torch.full((20_000,), float(n)) for n in numbers[::500]}
    halves = {n: pool.apply_async(halve, (tensor,)) for n, tensor in tensors.items()}
    answers = {n: pool.apply_async(work, (n,)) for n in numbers}
    for answer, expected in [
        *((answer, 3 * n) for n, answer in answers.items()),
        *((answer, tensors[n] / 2) for n, answer in halves.items()),
    ]:
        try:
            value = answer.get(timeout=120)
        except WorkerDiedError:
            counts["reported as lost"] += 1
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected))
            counts["values"] += 1


def run_half(tasks: int, workers: int, pause_s: float, retries: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    done = 0
    while done < tasks:
        for kind in (Pool, P2PPool):
            killer = Killer(pause_s)
            # Forked workers start quickly, so that many of them can be killed.
            with kind(workers, retries=retries, start_method="fork") as pool:
                pool.apply(work, (0,))
                killer.start()
                run_round(pool, done, ROUND, counts)
                killer.stop()
                pool.close()
                pool.join()
            done += ROUND
            counts["tasks"] += ROUND + ROUND // 500
            counts["kills"] += killer.kills
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill workers of pools.")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between kills")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Start helper processes that live as long as this one before the first count.
    with Pool(1) as pool:
        pool.apply(halve, (torch.zeros(20_000),))
    multiprocessing.active_children()
    before, start = count_all(), time.perf_counter()
    is_right = True
    for retries in (50, 0):
        counts = run_half(options.tasks // 2, options.workers, options.pause, retries)
        print(f"retries={retries}: {dict(counts)}", flush=True)
        is_right &= counts["values"] + counts["reported as lost"] == counts["tasks"]
        is_right &= counts["kills"] > 0
        is_right &= counts["reported as lost"] <= (0 if retries else counts["kills"])
    after = count_all()
    print(f"before {before}\nafter  {after}\n{time.perf_counter() - start:.0f} s")
    is_right &= after == before
    print("nothing lost, nothing leaked" if is_right else "WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
