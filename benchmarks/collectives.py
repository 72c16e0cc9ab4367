"""The cost of object collectives between ranks of one host, in milliseconds and as ratios.

Each payload is gathered on all ranks by stepwrap, by `torch.distributed.all_gather_object` and, if
it is a plain array, by the tensor collective, in a shuffled order within every round. Ratios are
taken within a round. "and read" adds one pass over the received data, because mapped memory costs
nothing until it is read. The last lines compare the scalars of a log interval: one reduction for
all of them, and one reduction each.

    python benchmarks/collectives.py [--ranks 2] [--rounds 15] [--mb 64] [--backend gloo]
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from report import Report, parse_options
from turns import process_group, spawn, take_turns

from stepwrap.collectives import all_gather_object, all_reduce_dict, mean_scalars

MB = 2**20
Contestant = Callable[[], object]


def torch_gather(payload: object) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, payload)
    return gathered


def bare_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def read(value: object) -> float:
    """Touch every byte of a received value."""
    if isinstance(value, torch.Tensor):
        return float(value.double().sum()) if value.numel() < 1000 else float(value.sum())
    if isinstance(value, np.ndarray):
        return float(value.sum())
    if isinstance(value, Mapping):
        return sum(read(entry) for entry in value.values())
    if isinstance(value, list):
        return sum(read(entry) for entry in value)
    return 0.0


def make_predictions(with_tensors: bool) -> list[dict[str, object]]:
    """Return 1,000 predictions of a detector: boxes, scores, labels and an id for each image."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    predictions: list[dict[str, object]] = []
    for image_id in range(1000):
        prediction: dict[str, object] = {
            "boxes": torch.rand(20, 4, generator=generator),
            "scores": torch.rand(20, generator=generator),
            "labels": torch.randint(80, (20,), generator=generator),
        }
        if not with_tensors:
            prediction = {key: value.tolist() for key, value in prediction.items()}
        predictions.append({**prediction, "image_id": image_id})
    return predictions


def make_payloads(mb: int) -> dict[str, object]:
    rank, count = dist.get_rank(), mb * MB // 4
    return {
        "small dict": {"loss": 0.5, "accuracy": 0.9, "samples": 32, "rank": rank},
        "1,000 predictions (tensors)": make_predictions(with_tensors=True),
        "1,000 predictions (lists)": make_predictions(with_tensors=False),
        f"{mb} MB tensor": torch.randn(count),
        f"{mb} MB numpy array": np.random.default_rng(rank).standard_normal(count, np.float32),
        f"uneven: {mb} MB on rank 0, 1 KB on others": torch.randn(count if rank == 0 else 256),
    }


def make_contestants(payload: object, mb: int) -> dict[str, Contestant]:
    contestants: dict[str, Contestant] = {
        "stepwrap": lambda: all_gather_object(payload),
        "torch": lambda: torch_gather(payload),
        "stepwrap and read": lambda: read(all_gather_object(payload)),
        "torch and read": lambda: read(torch_gather(payload)),
    }
    if isinstance(payload, np.ndarray):
        tensor = torch.from_numpy(payload)
        contestants["bare all_gather"] = lambda: bare_gather(tensor)
    elif isinstance(payload, torch.Tensor):
        largest = torch.zeros(mb * MB // 4)
        largest[: payload.numel()] = payload
        contestants["bare all_gather"] = lambda: bare_gather(largest)
    return contestants


def scalar_contestants(count: int) -> dict[str, Contestant]:
    scalars = {f"loss_{i}": torch.tensor(float(i)) for i in range(count)}

    def one_each() -> None:
        for value in scalars.values():
            dist.all_reduce(value.clone())

    return {
        "stepwrap mean_scalars": lambda: mean_scalars(scalars),
        "stepwrap all_reduce_dict": lambda: all_reduce_dict(scalars, "mean"),
        "one all_reduce each": one_each,
        "one all_reduce of one scalar": lambda: dist.all_reduce(torch.zeros(1)),
    }


def measure(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Return each contestant's milliseconds by round; small calls are repeated within a round."""

    def milliseconds(run: Contestant, repeats: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e3

    timed = {}
    for name, run in contestants.items():
        run()
        dist.barrier()
        start = time.perf_counter()
        run()
        # All ranks must make the same number of calls.
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        timed[name] = partial(milliseconds, run, max(1, min(50, int(0.02 / elapsed.item()))))
    return take_turns(timed, rounds)


def run_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    report = Report(options.json)
    if options.backend == "nccl":
        torch.cuda.set_device(rank)
    with process_group(rank, options.ranks, store, options.backend):
        for title, payload in make_payloads(options.mb).items():
            times = measure(make_contestants(payload, options.mb), options.rounds)
            pairs = {"stepwrap": "torch", "stepwrap and read": "torch and read"}
            if rank == 0:
                report.add(title, "ms", times, pairs)
        times = measure(scalar_contestants(20), options.rounds)
        if rank == 0:
            report.add("20 scalars of a log interval", "ms", times, "one all_reduce each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mb", type=int, default=64, help="size of the large arrays")
    parser.add_argument("--backend", default="gloo")
    options = parse_options(parser, {"rounds": 5, "mb": 8})
    spawn(run_rank, options.ranks, options)


if __name__ == "__main__":
    main()
