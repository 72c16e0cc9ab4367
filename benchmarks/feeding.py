"""How many samples per second loaders give, one thread, CPU time.

Batches of 64, shuffled: the digits (1,197 images of 8x8 with labels), and rows of 64 floats with
labels. Every contestant goes on from pass to pass; the order in which they take turns is shuffled
in every round. The hand-written loop indexes with parts of a permutation. The second table is the
time from asking for a new pass to its first batch, shuffling included.

    python benchmarks/feeding.py [--rounds 30] [--batches 200] [--most 1000000]
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from report import Report, parse_options
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from stepwrap.configs.digits import Digits
from stepwrap.loops import build_loader

BATCH = 64
FLOATS = 64
PLAIN = "DataLoader over single samples"
# Passes of which the first batch is taken in a round.
PASSES = 3

# Gives the batches of a pass, by its number.
Passes = Callable[[int], Iterable[Any]]


def ours(data: TensorDataset, in_memory: bool) -> Passes:
    loader = build_loader(data, batch_size=BATCH, shuffle=True, train=True, in_memory=in_memory)

    def of_pass(number: int) -> Iterable[Any]:
        loader.batch_sampler.set_position(number)
        return loader

    return of_pass


def by_hand(data: TensorDataset) -> Passes:
    def of_pass(number: int) -> Iterable[Any]:
        for rows in torch.randperm(len(data)).split(BATCH):
            yield [tensor[rows] for tensor in data.tensors]

    return of_pass


def contestants(data: TensorDataset) -> dict[str, Passes]:
    plain = DataLoader(data, batch_size=BATCH, shuffle=True)
    lists = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
    indexed = DataLoader(data, sampler=lists, batch_size=None)
    return {
        PLAIN: lambda _: plain,
        "DataLoader that indexes with lists": lambda _: indexed,
        "hand-written loop": by_hand(data),
        "stepwrap, in_memory: false": ours(data, in_memory=False),
        "stepwrap, in_memory: true": ours(data, in_memory=True),
    }


def endless(of_pass: Passes) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(of_pass, itertools.count()))


def batches_per_s(batches: Iterator[Any], count: int) -> float:
    start = time.process_time()
    for _ in itertools.islice(batches, count):
        pass
    return count / (time.process_time() - start)


def first_batch_ms(of_pass: Passes, number: int) -> float:
    start = time.process_time()
    for index in range(PASSES):
        next(iter(of_pass(PASSES * number + index)))
    return (time.process_time() - start) / PASSES * 1e3


def measure(
    makers: dict[str, Callable[[int], float]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Return what each measures in each round, which it is given."""
    values: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(warm_up + rounds):
        for name in random.sample(list(makers), len(makers)):
            value = makers[name](number)
            if number >= warm_up:
                values[name].append(value)
    return values


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
        runs = {name: endless(of_pass) for name, of_pass in contestants(data).items()}
        # The last batch of a pass is smaller.
        size = len(data) / -(-len(data) // BATCH)
        bursts = {
            name: lambda _, run=run, size=size: size * batches_per_s(run, options.batches)
            for name, run in runs.items()
        }
        rates = measure(bursts, options.rounds)
        report.add(f"samples, {title}", "samples/s", rates, PLAIN, higher_is_better=True)
    for title, data in sets.items():
        starts = {
            name: lambda number, of_pass=of_pass: first_batch_ms(of_pass, number)
            for name, of_pass in contestants(data).items()
        }
        report.add(f"a new pass, {title}", "ms", measure(starts, min(options.rounds, 10)), PLAIN)


if __name__ == "__main__":
    main()
