"""Measure contestants in turns, and start the ranks on which they run."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def take_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0
) -> dict[str, list[Any]]:
    """Call every contestant once per round, in a shuffled order, and return its results by round.

    The order is the same on all ranks. The results of the first `warm_up` rounds are dropped.
    """
    results: dict[str, list[Any]] = {name: [] for name in runs}
    shuffler = random.Random(0)
    for number in range(warm_up + rounds):
        for name in shuffler.sample(list(runs), len(runs)):
            result = runs[name]()
            if number >= warm_up:
                results[name].append(result)
    return results


def there_and_back(
    blocks: Mapping[str, Callable[[], None]], rounds: int, finish: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the milliseconds of each contestant's block by round.

    Every round runs the blocks in a shuffled order and then in the reverse order, so that a machine
    that slows down affects all of them equally. `finish` waits for the device and the other ranks.
    """
    shuffler = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds):
        names, seconds = shuffler.sample(list(blocks), len(blocks)), dict.fromkeys(blocks, 0.0)
        for name in [*names, *reversed(names)]:
            finish()
            start = time.perf_counter()
            blocks[name]()
            finish()
            seconds[name] += time.perf_counter() - start
        for name, value in seconds.items():
            times[name].append(value / 2 * 1000)
    return times


@contextmanager
def process_group(rank: int, ranks: int, store: str, backend: str = "gloo") -> Iterator[None]:
    """Join the process group of `ranks` that meet through the file `store`; one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def spawn(run: Callable[..., None], ranks: int, *args: object) -> None:
    """Call `run(rank, store, *args)` in `ranks` processes; `store` is the path of a new file."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder, "store")), *args), nprocs=ranks)
