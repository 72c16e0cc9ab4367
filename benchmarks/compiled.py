"""A training step with `compile: step`, compared with a hand-written eager loop.

A perceptron (64-128-10, SGD, batches of 32), the digits CNN (AdamW, 64) and the transformer of
source_lm (AdamW, clipped, 32 x 64 characters), with batches in memory and one thread. Blocks of
steps take turns within every round, in a shuffled order; ratios are relative to the hand-written
loop in the same round. On the CPU, processor time is measured. Compiling is reported separately:
with an empty cache, and from the cache as in a fresh process. JAX takes part if it is installed
(`make bench-peers`), with a jitted step of the perceptron.

With --device cuda: the perceptron, a ResNet-18 (SGD, 32 images of 224 x 224) and a GPT of 124
million parameters (AdamW, clipped, bfloat16, 8 x 1,024 tokens), also by hand with the model in
`torch.compile`, in wall-clock time.

The last table shows whole epochs of the perceptron: our training loop with the default hooks of a
config, and a hand-written loop over the same loader of data in memory.

    python benchmarks/compiled.py [--rounds 21] [--device cuda] [--only perceptron cnn transformer]
"""

import argparse
import contextlib
import importlib.util
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Report, parse_options
from step_overhead import HOOKS_BY_DEFAULT, WARM_UP, jitted_step
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from turns import take_turns

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.configs.source_lm import CharTransformer, NextCharLoss, SourceText
from stepwrap.loops import EpochTrainLoop, HookList, LoopState, StepBlocksHook, build_loader
from stepwrap.wrappers import (
    AmpOptimWrapper,
    OptimWrapper,
    SingleDevice,
    SupervisedModel,
    compile_step,
)

SECONDS = 0.15

BLOCK = 32
BY_HAND, EAGER, COMPILED = "by hand", "stepwrap, eager", "stepwrap, compile: step"
COMPILED_BY_HAND = "by hand, torch.compile"
IN_BLOCKS = f"{COMPILED}, {BLOCK} steps per call"
JAX = "JAX, jitted step"

Batch = tuple[Tensor, Tensor]
# Trains on batches, one after the other.
Train = Callable[[list[Batch]], object]


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
        inputs, targets = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
        batches.append((inputs, targets))
    net = CharTransformer(width=96, depth=2, heads=4, max_length=64)
    options = {"lr": 0.003, "clip": 1.0}
    return SupervisedModel(net, NextCharLoss()), torch.optim.AdamW, batches, options


class Residual(nn.Module):
    """Two convolutions with a shortcut (He et al., 2015, figure 2)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and before == width
        across = nn.Conv2d(before, width, 1, stride, bias=False)
        self.around = nn.Identity() if same else nn.Sequential(across, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.around(x))


def resnet18() -> tuple[nn.Module, Any, list[Batch], dict[str, Any]]:
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, padding=1)]
    for before, width, stride in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]:
        layers += [Residual(before, width, stride), Residual(width, width, 1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    batches = [(torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))) for _ in range(4)]
    return SupervisedModel(net, nn.CrossEntropyLoss()), torch.optim.SGD, batches, {"lr": 0.01}


def gpt() -> tuple[nn.Module, Any, list[Batch], dict[str, Any]]:
    net = CharTransformer(width=768, depth=12, heads=12, max_length=1024)
    # The vocabulary of GPT-2, with input and output embeddings tied.
    net.characters, net.head = nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False)
    net.head.weight = nn.init.normal_(net.characters.weight, std=0.02)
    codes = torch.randint(50257, (4, 8, 1025))
    batches = [(block[:, :-1].contiguous(), block[:, 1:].contiguous()) for block in codes]
    options = {"lr": 3e-4, "clip": 1.0, "precision": torch.bfloat16}
    return SupervisedModel(net, NextCharLoss()), torch.optim.AdamW, batches, options


MODELS = {
    "cpu": {"perceptron": perceptron, "cnn": cnn, "transformer": transformer},
    "cuda": {"perceptron": perceptron, "resnet18": resnet18, "gpt": gpt},
}


def train_plainly(
    model: Any,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    precision: torch.dtype | None = None,
    compiled: bool = False,
) -> Train:
    net, loss_of = torch.compile(model.net) if compiled else model.net, model.loss

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = loss_of(net(inputs), targets)
        return loss

    if precision is not None:
        forward = torch.autocast(next(net.parameters()).device.type, precision)(forward)

    def train(batches: Any) -> None:
        for inputs, targets in batches:
            loss = forward(inputs, targets)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    return train


def train_with_wrapper(
    model: Any,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    precision: torch.dtype | None,
    kind: str,
) -> Train:
    wrapper: Any = SingleDevice(model)
    if kind != EAGER:
        compile_step(wrapper, min_steps=0)
    clip_grad = None if clip is None else {"max_norm": clip}
    optim = OptimWrapper(optimizer, clip_grad=clip_grad)
    if precision is not None:
        optim = AmpOptimWrapper(optimizer, dtype=precision, clip_grad=clip_grad)
    if kind == IN_BLOCKS:
        return lambda batches: wrapper.train_steps(batches, optim)

    def train(batches: list[Batch]) -> None:
        for batch in batches:
            wrapper.train_step(batch, optim)

    return train


def train_with_jax(model: Any) -> Train:
    weights, step = jitted_step(model.net)
    import jax

    copies: dict[int, Any] = {}

    def train(batches: list[Batch]) -> None:
        nonlocal weights
        for batch in batches:
            if id(batch) not in copies:
                copies[id(batch)] = [jax.numpy.array(tensor.numpy()) for tensor in batch]
            weights, _ = step(weights, *copies[id(batch)])
        jax.block_until_ready(weights)

    return train


def make(name: str, kind: str, device: str) -> tuple[Train, list[Batch], float]:
    """Return a training function, 32 batches, and the seconds of the first four steps."""
    torch.manual_seed(0)
    model, optimizer_class, batches, options = MODELS[device][name]()
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
    clip, precision = options.pop("clip", None), options.pop("precision", None)
    model.to(device).train()
    optimizer = optimizer_class(model.parameters(), **options)
    if kind in (BY_HAND, COMPILED_BY_HAND):
        train = train_plainly(model, optimizer, clip, precision, compiled=kind != BY_HAND)
    elif kind == JAX:
        train = train_with_jax(model)
    else:
        train = train_with_wrapper(model, optimizer, clip, precision, kind)
    begin = clock(device)
    train((batches * 4)[:4])
    return train, (batches * BLOCK)[:BLOCK], clock(device) - begin


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def us_per_step(train: Train, batches: list[Batch], device: str) -> float:
    """Return microseconds per step: processor time on a CPU, wall-clock time on a GPU."""
    count, begin, start = 0, clock(device), time.process_time()
    while time.perf_counter() - begin < SECONDS:
        train(batches)
        count += len(batches)
    took = time.process_time() - start if device == "cpu" else clock(device) - begin
    return took / count * 1e6


class ClockedLoader:
    """Yields the batches of a loader, and times those between the warm-up and the last one."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        rows = BLOCK * (WARM_UP + steps + 1)
        data = TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,)))
        self.loader = build_loader(data, batch_size=BLOCK, shuffle=True, train=True)
        self.steps, self.us_per_step = steps, 0.0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        start = 0.0
        for index, batch in enumerate(self.loader):
            if index == WARM_UP:
                start = time.process_time()
            elif index == WARM_UP + self.steps:
                self.us_per_step = (time.process_time() - start) / self.steps * 1e6
            yield batch


def epoch_by_hand(loader: ClockedLoader) -> Callable[[], object]:
    model, optimizer_class, _, options = perceptron()
    train: Any = train_plainly(model, optimizer_class(model.parameters(), **options), None)
    return lambda: train(loader)


def epoch_by_loop(loader: ClockedLoader, *, compiled: bool, block: int = 1) -> Any:
    model, optimizer_class, _, options = perceptron()
    wrapper = SingleDevice(model)
    if compiled:
        compile_step(wrapper, min_steps=0)
    optim = OptimWrapper(optimizer_class(model.parameters(), **options))

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = LoopState(model=wrapper, optim_wrapper=optim, run_dir=Path(folder))
            loop = EpochTrainLoop(loader, max_epochs=1)
            blocks = [StepBlocksHook(block)] if block > 1 else []
            loop.run(state, HookList([*(hook() for hook in HOOKS_BY_DEFAULT), *blocks]))

    return run


def compare_epochs(report: Report, rounds: int, steps: int) -> None:
    loader = ClockedLoader(steps)
    runs = {
        BY_HAND: epoch_by_hand(loader),
        EAGER: epoch_by_loop(loader, compiled=False),
        COMPILED: epoch_by_loop(loader, compiled=True),
        f"{COMPILED}, blocks of {BLOCK} steps": epoch_by_loop(loader, compiled=True, block=BLOCK),
    }

    def us_of_epoch(run: Callable[[], object]) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            run()
        return loader.us_per_step

    timed = {kind: partial(us_of_epoch, run) for kind, run in runs.items()}
    # The first round compiles.
    took = take_turns(timed, rounds, warm_up=1)
    report.add("a step of the perceptron in the loop, default hooks", "us", took, BY_HAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=1000, help="steps of an epoch")
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--only", nargs="*", metavar="MODEL")
    options = parse_options(parser, {"rounds": 5, "steps": 200, "only": ["perceptron"]})
    torch.set_num_threads(1)
    report, device = Report(options.json), options.device
    kinds = [BY_HAND, EAGER, COMPILED, IN_BLOCKS]
    kinds += [COMPILED_BY_HAND] if device == "cuda" else []
    chosen = options.only or MODELS[device]
    if unknown := set(chosen) - set(MODELS[device]):
        parser.error(f"no model {min(unknown)} on {device}: {', '.join(MODELS[device])}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for name in chosen:
            _, _, cold = make(name, COMPILED, device)
            has_jax = (name, device) == ("perceptron", "cpu") and importlib.util.find_spec("jax")
            trainers = {
                kind: make(name, kind, device) for kind in (*kinds, *([JAX] if has_jax else []))
            }
            runs = {
                kind: partial(us_per_step, train, batches, device)
                for kind, (train, batches, _) in trainers.items()
            }
            report.add(f"a step of the {name}", "us", take_turns(runs, options.rounds), BY_HAND)
            seconds = {"eager": [trainers[EAGER][2]], COMPILED: [cold]}
            seconds[f"{COMPILED}, from the cache"] = [trainers[COMPILED][2]]
            report.add(f"the first four steps of the {name}", "s", seconds, ratio_to={})
        if device == "cpu" and "perceptron" in chosen:
            compare_epochs(report, options.rounds, options.steps)


if __name__ == "__main__":
    main()
