"""Samples per second of data loaders, in the CPU time of one thread.

Batches of 64, shuffled: the digits (1,197 images of 8x8 with labels), and rows of 64 floats with
labels. Every contestant continues from pass to pass; they take turns in a shuffled order. The
hand-written loop indexes with parts of a permutation. The second table is the time from the request
for a new pass to its first batch, including shuffling.

    python benchmarks/feeding.py [--rounds 30] [--batches 200] [--most 1000000]
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from report import Report, parse_options
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from turns import take_turns

from stepwrap.configs.digits import Digits
from stepwrap.loops import build_loader

BATCH = 64
FLOATS = 64
PLAIN = "DataLoader over single samples"
# The number of passes per round of which the first batch is read.
PASSES = 3

# Returns the batches of the pass with a given number.
Passes = Callable[[int], Iterable[Any]]


def by_stepwrap(data: TensorDataset, in_memory: bool) -> Passes:
    loader = build_loader(data, batch_size=BATCH, shuffle=True, train=True, in_memory=in_memory)

    def read_pass(number: int) -> Iterable[Any]:
        loader.batch_sampler.set_position(number)
        return loader

    return read_pass


def feed_plainly(data: TensorDataset) -> Passes:
    def read_pass(number: int) -> Iterable[Any]:
        for rows in torch.randperm(len(data)).split(BATCH):
            yield [tensor[rows] for tensor in data.tensors]

    return read_pass


def contestants(data: TensorDataset) -> dict[str, Passes]:
    plain = DataLoader(data, batch_size=BATCH, shuffle=True)
    lists = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
    indexed = DataLoader(data, sampler=lists, batch_size=None)
    return {
        PLAIN: lambda _: plain,
        "DataLoader that indexes with lists": lambda _: indexed,
        "hand-written loop": feed_plainly(data),
        "stepwrap, in_memory: false": by_stepwrap(data, in_memory=False),
        "stepwrap, in_memory: true": by_stepwrap(data, in_memory=True),
    }


def endless(read_pass: Passes) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(read_pass, itertools.count()))


def batches_per_s(batches: Iterator[Any], count: int) -> float:
    start = time.process_time()
    for _ in itertools.islice(batches, count):
        pass
    return count / (time.process_time() - start)


def first_batch_ms(read_pass: Passes, numbers: Iterator[int]) -> float:
    start = time.process_time()
    for number in itertools.islice(numbers, PASSES):
        next(iter(read_pass(number)))
    return (time.process_time() - start) / PASSES * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batches", type=int, default=200, help="batches in a round")
    parser.add_argument("--most", type=int, default=1_000_000, help="samples of the largest set")
    options = parse_options(parser, {"rounds": 8, "batches": 100})
    torch.set_num_threads(1)
    report = Report(options.json)
    sizes = [10**power for power in range(3, 8) if 10**power <= options.most]
    sets: dict[str, TensorDataset] = {"digits": Digits("train")}
    for size in sizes:
        rows = torch.randn(size, FLOATS), torch.randint(0, 10, (size,))
        sets[f"{size:,} rows"] = TensorDataset(*rows)
    for title, data in sets.items():
        runs = {name: endless(read_pass) for name, read_pass in contestants(data).items()}
        # The last batch of a pass is smaller.
        size = len(data) / -(-len(data) // BATCH)
        bursts = {
            name: lambda run=run, size=size: size * batches_per_s(run, options.batches)
            for name, run in runs.items()
        }
        rates = take_turns(bursts, options.rounds, warm_up=2)
        report.add(f"samples, {title}", "samples/s", rates, PLAIN, higher_is_better=True)
    for title, data in sets.items():
        starts = {
            name: partial(first_batch_ms, read_pass, itertools.count())
            for name, read_pass in contestants(data).items()
        }
        times = take_turns(starts, min(options.rounds, 10), warm_up=2)
        report.add(f"a new pass, {title}", "ms", times, PLAIN)


if __name__ == "__main__":
    main()
