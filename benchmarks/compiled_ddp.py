"""A step under ddp with `compile: step`, compared with torch's DistributedDataParallel by hand.

Perceptrons of 10^4, 10^6 and 10^7 parameters, SGD, 32 samples for each rank, on gloo ranks with one
thread each. As in wrappers.py, blocks of steps take turns in the same processes, and ratios are
relative to the hand-written loop in the same round. With more ranks than cores, they share the
cores. The figures do not include compiling.

    python benchmarks/compiled_ddp.py [--ranks 2 4] [--rounds 21] [--sizes 10^4 10^6 10^7]
"""

import argparse

import torch
from report import Report, parse_options
from turns import process_group, spawn

from stepwrap.wrappers import StepDistributedDataParallel, SupervisedModel, compile_step
from wrappers import SIZES, make_batch, make_ddp, make_net, measure, train_with_wrapper


def compiled(size: str, device: torch.device) -> object:
    model = SupervisedModel(make_net(size, device), torch.nn.CrossEntropyLoss())
    wrapper = compile_step(StepDistributedDataParallel(model))
    return train_with_wrapper(wrapper, make_batch(size, device))


def run(rank: int, store: str, settings: argparse.Namespace, ranks: int) -> None:
    device = torch.device("cpu")
    with process_group(rank, ranks, store):
        for size in settings.sizes:
            steps = {
                "by hand": make_ddp("by hand", size, device),
                "stepwrap, eager": make_ddp("stepwrap", size, device),
                "stepwrap, compile: step": compiled(size, device),
            }
            times = measure(steps, settings, device)
            if rank == 0:
                title = f"{ranks} ranks, {size} parameters: a step"
                Report(settings.json).add(title, "ms", times, "by hand")
            del steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.25, help="a block of steps")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    quick = {"ranks": [2], "rounds": 5, "seconds": 0.1, "sizes": ["10^4"]}
    settings = parse_options(parser, quick)
    for ranks in settings.ranks:
        spawn(run, ranks, settings, ranks)


if __name__ == "__main__":
    main()
