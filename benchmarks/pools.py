"""Our pools compared with others: tasks per second, round trips, tensors, lambdas, start and end.

All pools are open while a measurement runs, and take turns in a shuffled order within every round.
Ratios are relative to the standard library's Pool. Slow contestants get fewer tasks. machin and
loky take part if they are installed (loky comes with joblib).

    python benchmarks/pools.py [--rounds 7] [--only tasks latency tensors lambdas start]
"""

import argparse
import concurrent.futures
import importlib
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from report import Report, parse_options
from turns import take_turns

from stepwrap.parallel import P2PPool, Pool

TENSORS = 16
KB, MB = 2**10, 2**20
SIZES = {"64 KB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB}
OURS = ("stepwrap Pool", "stepwrap P2PPool")
PEER = "multiprocessing"
Map = Callable[..., Any]


def same(value: object) -> object:
    return value


def first_element(tensor: torch.Tensor) -> float:
    return float(tensor.view(-1)[0])


def make_tensor(size: int) -> torch.Tensor:
    # Workers call this as well; with several threads each they would compete for cores.
    torch.set_num_threads(1)
    return torch.ones(size // 4)


class Contestant:
    """The pool of one library behind a common interface.

    Attributes:
        map: called with a function, its arguments, and the chunk size or None.
        apply: called with a function and its argument; waits for the result.
        share: the fraction of the tasks to run, below 1 for slow pools.
    """

    def __init__(self, map: Map, apply: Map, share: float = 1.0) -> None:
        self.map, self.apply, self.share = map, apply, share


@contextmanager
def pool_like(pool: Any, share: float = 1.0) -> Iterator[Contestant]:
    try:
        yield Contestant(pool.map, lambda fn, value: pool.apply(fn, (value,)), share)
    finally:
        pool.close()
        pool.join()


@contextmanager
def executor_like(executor: Any, workers: int) -> Iterator[Contestant]:
    def map_all(fn: Any, items: Any, chunksize: int | None = None) -> list[object]:
        chunk = chunksize or max(1, math.ceil(len(items) / (4 * workers)))
        return list(executor.map(fn, items, chunksize=chunk))

    with executor:
        yield Contestant(map_all, lambda fn, value: executor.submit(fn, value).result(), 0.1)


@contextmanager
def joblib_like(joblib: Any, workers: int) -> Iterator[Contestant]:
    with joblib.Parallel(n_jobs=workers) as parallel:

        def map_all(fn: Any, items: Any, chunksize: int | None = None) -> Any:
            parallel.batch_size = chunksize or "auto"
            return parallel(joblib.delayed(fn)(item) for item in items)

        yield Contestant(map_all, lambda fn, value: map_all(fn, [value])[0], 0.1)


def openers(workers: int) -> dict[str, Callable[[], Any]]:
    """Return a function that opens a pool for each contestant that is installed."""
    spawn = multiprocessing.get_context("spawn")
    makers: dict[str, Callable[[], Any]] = {
        "stepwrap Pool": lambda: pool_like(Pool(workers)),
        "stepwrap P2PPool": lambda: pool_like(P2PPool(workers)),
        PEER: lambda: pool_like(spawn.Pool(workers)),
        "torch.multiprocessing": lambda: pool_like(
            torch.multiprocessing.get_context("spawn").Pool(workers)
        ),
        "concurrent.futures": lambda: executor_like(
            concurrent.futures.ProcessPoolExecutor(workers, spawn), workers
        ),
    }
    for name, module in (("loky", "joblib.externals.loky"), ("joblib", "joblib")):
        try:
            peer = importlib.import_module(module)
        except ImportError:
            continue
        if name == "loky":
            makers[name] = lambda peer=peer: executor_like(
                peer.ProcessPoolExecutor(max_workers=workers), workers
            )
        else:
            makers[name] = lambda peer=peer: joblib_like(peer, workers)
    try:
        machin = importlib.import_module("machin.parallel.pool")
    except ImportError:
        return makers
    makers["machin"] = lambda: pool_like(machin.Pool(workers, is_recursive=True), 0.1)
    return makers


# The first round does not count.
measure = partial(take_turns, warm_up=1)


@contextmanager
def opened(workers: int, names: Collection[str]) -> Iterator[dict[str, Contestant]]:
    with ExitStack() as stack:
        pools: dict[str, Contestant] = {}
        for name, opener in openers(workers).items():
            if name in names:
                pools[name] = stack.enter_context(opener())
                pools[name].apply(same, 0)
        yield pools


def rate(call: Callable[[], object], count: float) -> float:
    start = time.perf_counter()
    call()
    return count / (time.perf_counter() - start)


def compare_tasks(options: argparse.Namespace, report: Report) -> None:
    for workers in options.workers:
        fast = {*OURS, PEER, "torch.multiprocessing"}
        names = {*options.contestants} & fast if workers > 2 else options.contestants
        with opened(workers, names) as pools:
            for chunk in (1, None):
                runs = {}
                for name, pool in pools.items():
                    count = int(options.tasks * (pool.share if chunk else 1))
                    items = list(range(count))
                    runs[name] = lambda pool=pool, items=items, chunk=chunk: rate(
                        lambda: pool.map(same, items, chunk), len(items)
                    )
                how = "chunk size 1" if chunk else "automatic chunks"
                title = f"empty tasks, {workers} workers, {how}"
                values = measure(runs, options.rounds)
                report.add(title, "/s", values, PEER, higher_is_better=True)


def compare_latency(options: argparse.Namespace, report: Report) -> None:
    def one(pool: Contestant) -> float:
        times = []
        for _ in range(int(300 * max(pool.share, 0.3))):
            start = time.perf_counter()
            pool.apply(same, 1)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    with opened(2, options.contestants) as pools:
        runs = {name: lambda pool=pool: one(pool) for name, pool in pools.items()}
        report.add("round trip of one task", "us", measure(runs, options.rounds), PEER)


def compare_tensors(options: argparse.Namespace, report: Report) -> None:
    def arguments(pool: Contestant, size: int) -> float:
        tensors = [make_tensor(size) for _ in range(TENSORS)]
        return rate(lambda: pool.map(first_element, tensors, 1), TENSORS * size / 1e9)

    def results(pool: Contestant, size: int) -> float:
        return rate(lambda: pool.map(make_tensor, [size] * TENSORS, 1), TENSORS * size / 1e9)

    with opened(2, options.contestants) as pools, ExitStack() as stack:
        for name, kind in zip(OURS, (Pool, P2PPool), strict=True):
            shared = kind(2, is_copy_tensor=False, share_method="cpu")
            pools[f"{name}, by reference"] = stack.enter_context(pool_like(shared))
        for title, run in (("as arguments", arguments), ("made and returned", results)):
            for size, count in SIZES.items():
                runs = {name: partial(run, pool, count) for name, pool in pools.items()}
                values = measure(runs, options.rounds)
                subject = f"tensors of {size} {title}"
                report.add(subject, "GB/s", values, PEER, higher_is_better=True)


def compare_lambdas(options: argparse.Namespace, report: Report) -> None:
    count = options.tasks // 2
    with opened(2, {*OURS, "loky", "joblib", "machin"} & {*options.contestants}) as pools:
        runs = {
            name: lambda pool=pool: rate(
                lambda: pool.map(lambda value: value + count, list(range(count)), 1), count
            )
            for name, pool in pools.items()
        }
        # The standard library's pool cannot pickle lambdas, so loky is the reference.
        values = measure(runs, options.rounds)
        report.add("calls of a lambda, chunk size 1", "/s", values, "loky", higher_is_better=True)


def compare_starts(options: argparse.Namespace, report: Report) -> None:
    starts: dict[str, Callable[[], float]] = {}
    ends: dict[str, list[float]] = {}

    def start_and_end(name: str, opener: Callable[[], Any]) -> float:
        start = time.perf_counter()
        with opener() as pool:
            pool.apply(same, 0)
            took, end = time.perf_counter() - start, time.perf_counter()
        ends.setdefault(name, []).append(time.perf_counter() - end)
        return took

    for name in options.contestants:
        opener = openers(2)[name]
        starts[name] = lambda name=name, opener=opener: start_and_end(name, opener)
    report.add("from nothing to the first result", "s", measure(starts, options.rounds), PEER)
    report.add("close and join", "s", {name: ends[name][1:] for name in starts}, PEER)


KINDS = {
    "tasks": compare_tasks,
    "latency": compare_latency,
    "tensors": compare_tensors,
    "lambdas": compare_lambdas,
    "start": compare_starts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8], help="for empty tasks")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    names = list(openers(1))
    parser.add_argument("--contestants", nargs="+", choices=names, default=names)
    # A quick run starts few processes, because each one imports torch.
    quick = {
        "rounds": 3,
        "tasks": 4000,
        "workers": [2],
        "only": ["tasks", "latency", "tensors"],
        "contestants": [*OURS, PEER],
    }
    options = parse_options(parser, quick)
    torch.set_num_threads(1)
    report = Report(options.json)
    for name in options.only:
        KINDS[name](options, report)


if __name__ == "__main__":
    main()
