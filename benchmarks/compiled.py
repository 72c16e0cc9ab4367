"""What `compile: step` makes of a training step, beside the eager loop written by hand.

A perceptron (64-128-10, SGD, batches of 32), the digits CNN (AdamW, 64) and the transformer of
source_lm (AdamW, clipped, 32 x 64 characters), with batches in memory and one thread. Blocks of
steps take turns within every round, in another order each time; ratios are taken to the loop by
hand of the same round. On the CPU the processor's time counts. Compiling is not in the figures: it
is told apart, first with an empty cache and then from the cache, as a fresh process would.

    python benchmarks/compiled.py [--rounds 21] [--only perceptron cnn transformer]
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Report, parse_options
from torch import Tensor, nn

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.configs.source_lm import CharTransformer, NextCharLoss, SourceText
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel, compile_step

SECONDS = 0.15

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], object]


def perceptron() -> tuple[nn.Module, Any, list[Batch], dict[str, Any]]:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(16)]
    return SupervisedModel(net, nn.CrossEntropyLoss()), torch.optim.SGD, batches, {"lr": 0.01}


def cnn() -> tuple[nn.Module, Any, list[Batch], dict[str, Any]]:
    data = Digits("train")
    pairs = list(zip(data.images.split(64), data.labels.split(64), strict=True))[:16]
    model = SupervisedModel(SmallCNN(), nn.CrossEntropyLoss())
    return model, torch.optim.AdamW, pairs, {"lr": 0.003}


def transformer() -> tuple[nn.Module, Any, list[Batch], dict[str, Any]]:
    data = SourceText("train", block=64)
    batches = []
    for start in range(0, 256, 32):
        samples = [data[index] for index in range(start, start + 32)]
        inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        batches.append((inputs, targets))
    net = CharTransformer(width=96, depth=2, heads=4, max_length=64)
    options = {"lr": 0.003, "clip": 1.0}
    return SupervisedModel(net, NextCharLoss()), torch.optim.AdamW, batches, options


MODELS = {"perceptron": perceptron, "cnn": cnn, "transformer": transformer}


def by_hand(model: Any, optimizer: torch.optim.Optimizer, clip: float | None) -> Step:
    net, loss_of = model.net, model.loss

    def step(batch: Batch) -> None:
        loss = loss_of(net(batch[0]), batch[1])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_wrapper(
    model: Any, optimizer: torch.optim.Optimizer, clip: float | None, *, compiled: bool
) -> Step:
    wrapper: Any = SingleDevice(model)
    if compiled:
        compile_step(wrapper)
    optim = OptimWrapper(optimizer, clip_grad=None if clip is None else {"max_norm": clip})
    return lambda batch: wrapper.train_step(batch, optim)


def make(name: str, kind: str) -> tuple[Step, list[Batch], float]:
    """A step, its batches, and the seconds that the first four steps take."""
    torch.manual_seed(0)
    model, optimizer_class, batches, options = MODELS[name]()
    clip = options.pop("clip", None)
    optimizer = optimizer_class(model.parameters(), **options)
    model.train()
    if kind == "by hand":
        step = by_hand(model, optimizer, clip)
    else:
        step = by_wrapper(model, optimizer, clip, compiled=kind == "stepwrap, compile: step")
    begin = time.perf_counter()
    for batch in batches[:4]:
        step(batch)
    return step, batches, time.perf_counter() - begin


def us_per_step(step: Step, batches: list[Batch]) -> float:
    count, begin, start = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < SECONDS:
        for batch in batches:
            step(batch)
        count += len(batches)
    return (time.process_time() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parse_options(parser, {"rounds": 5, "only": ["perceptron", "cnn"]})
    torch.set_num_threads(1)
    report = Report(options.json)
    kinds = ("by hand", "stepwrap, eager", "stepwrap, compile: step")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for name in options.only:
            _, _, cold = make(name, kinds[-1])
            made = {kind: make(name, kind) for kind in kinds}
            took: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind in random.sample(kinds, len(kinds)):
                    took[kind].append(us_per_step(*made[kind][:2]))
            report.add(f"a step of the {name}", "us", took, "by hand")
            seconds = {"eager": [made[kinds[1]][2]], "stepwrap, compile: step": [cold]}
            seconds["stepwrap, compile: step, from the cache"] = [made[kinds[-1]][2]]
            report.add(f"the first four steps of the {name}", "s", seconds, "eager")


if __name__ == "__main__":
    main()
