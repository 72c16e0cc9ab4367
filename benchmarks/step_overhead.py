"""What a training step costs over a hand-written loop, in microseconds and as a ratio.

A 64-128-10 perceptron, batches of 32, SGD, one thread. The same batches lie in memory for all, so
that nobody pays for a DataLoader. All contestants run in turn within every round; a ratio is taken
to the hand-written loop of the same round, and the median over the rounds is printed. The clock
runs from the reading of an early batch to that of the last one, so that nobody's start and end
count. Peers that are installed beside stepwrap are measured too.

    python benchmarks/step_overhead.py [--device cuda] [--steps 1000] [--rounds 25]
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from stepwrap.loops import (
    CheckpointHook,
    EpochTrainLoop,
    HookList,
    LogHook,
    LoopState,
    ProgressHook,
    ThroughputHook,
)
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

HOOKS_BY_DEFAULT = (ProgressHook, LogHook, CheckpointHook, ThroughputHook)

Batch = tuple[Tensor, Tensor]
Contestant = Callable[[], None]
WARM_UP = 100


class ClockedBatches(Sequence[Batch]):
    """Batches in memory that note when the first one after the warm-up and the last are read.

    Every contestant takes them in place of a data loader.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 32, 64, generator=generator).to(device)
        targets = torch.randint(10, (64, 32), generator=generator).to(device)
        pool = list(zip(inputs, targets, strict=True))
        self.batches = [pool[i % len(pool)] for i in range(WARM_UP + steps + 1)]
        # mmengine looks for the description of the data there.
        self.dataset = self.batches
        self.device = device
        self.marks: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        if index == WARM_UP or index == len(self.batches) - 1:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.marks[index] = time.perf_counter()
        return self.batches[index]

    def us_per_step(self) -> float:
        seconds = self.marks[len(self) - 1] - self.marks[WARM_UP]
        return seconds / (len(self) - 1 - WARM_UP) * 1e6


CONTESTANTS: dict[str, Callable[[ClockedBatches, torch.device], Contestant]] = {}


def contestant(name: str, needs: str | None = None):  # noqa: ANN201
    """Registers a maker of contestants, when the package it needs is installed."""

    def register(make: Callable[[ClockedBatches, torch.device], Contestant]):  # noqa: ANN202
        if needs is None or importlib.util.find_spec(needs) is not None:
            CONTESTANTS[name] = make
        return make

    return register


def make_parts(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


@contestant("hand-written loop")
def hand_written(batches: ClockedBatches, device: torch.device) -> Contestant:
    net, optimizer = make_parts(device)
    loss_of = nn.CrossEntropyLoss()

    def run() -> None:
        net.train()
        for inputs, target in batches:
            loss = loss_of(net(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


@contestant("stepwrap wrapper")
def wrapper(
    batches: ClockedBatches, device: torch.device, loss_weight: str | None = None
) -> Contestant:
    net, optimizer = make_parts(device)
    model = SingleDevice(SupervisedModel(net, nn.CrossEntropyLoss()).to(device))
    optim_wrapper = OptimWrapper(optimizer, loss_weight=loss_weight)

    def run() -> None:
        model.train()
        for batch in batches:
            model.train_step(batch, optim_wrapper)

    return run


for weight in ("samples", "tokens"):
    CONTESTANTS[f"stepwrap wrapper, loss_weight: {weight}"] = partial(wrapper, loss_weight=weight)


def run_loop(batches: ClockedBatches, device: torch.device, make_hooks: Callable[[], list]) -> None:
    net, optimizer = make_parts(device)
    model = SingleDevice(SupervisedModel(net, nn.CrossEntropyLoss()).to(device))
    with tempfile.TemporaryDirectory() as folder:
        state = LoopState(model=model, optim_wrapper=OptimWrapper(optimizer), run_dir=Path(folder))
        hooks = HookList(make_hooks())
        for call in hooks.on_run_start:
            call(state)
        EpochTrainLoop(batches, max_epochs=1).run(state, hooks)
        for call in hooks.on_run_end:
            call(state)


@contestant("stepwrap loop, no hooks")
def bare_loop(batches: ClockedBatches, device: torch.device) -> Contestant:
    return lambda: run_loop(batches, device, list)


@contestant("stepwrap loop, default hooks")
def default_loop(batches: ClockedBatches, device: torch.device) -> Contestant:
    return lambda: run_loop(batches, device, lambda: [make() for make in HOOKS_BY_DEFAULT])


@contestant("ignite Engine", needs="ignite")
def ignite_engine(batches: ClockedBatches, device: torch.device) -> Contestant:
    from ignite.engine import Engine

    net, optimizer = make_parts(device)
    loss_of = nn.CrossEntropyLoss()

    def step(engine: object, batch: Batch) -> Tensor:
        loss = loss_of(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def run() -> None:
        net.train()
        Engine(step).run(batches, max_epochs=1)

    return run


@contestant("accelerate", needs="accelerate")
def accelerate_loop(batches: ClockedBatches, device: torch.device) -> Contestant:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    net, optimizer = accelerator.prepare(*make_parts(device))
    loss_of = nn.CrossEntropyLoss()

    def run() -> None:
        net.train()
        for inputs, target in batches:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net(inputs), target))
                optimizer.step()
                optimizer.zero_grad()

    return run


@contestant("mmengine Runner, default hooks", needs="mmengine")
def mmengine_runner(batches: ClockedBatches, device: torch.device) -> Contestant:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = make_parts(device)
            self.loss_of = nn.CrossEntropyLoss()

        def forward(self, inputs: Tensor, target: Tensor, mode: str = "tensor"):  # noqa: ANN202
            return {"loss": self.loss_of(self.net(inputs), target)}

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Runner(
                model=Model(),
                work_dir=folder,
                train_dataloader=batches,
                train_cfg={"by_epoch": True, "max_epochs": 1},
                optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
                experiment_name=f"round_{time.monotonic_ns()}",
                log_level="ERROR",
            ).train()

    return run


@contestant("Lightning Trainer, CSV log + bar + checkpoint", needs="pytorch_lightning")
def lightning_trainer(batches: ClockedBatches, device: torch.device) -> Contestant:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer = make_parts(device)
            self.loss_of = nn.CrossEntropyLoss()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss: Tensor = self.loss_of(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            lightning.Trainer(
                max_epochs=1,
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                default_root_dir=folder,
                enable_model_summary=False,
            ).fit(Module(), batches)

    return run


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()):
            yield


def measure(run: Contestant, batches: ClockedBatches) -> float:
    """Microseconds per step; the garbage of earlier contestants is collected before."""
    gc.collect()
    with quiet():
        run()
    return batches.us_per_step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    device = torch.device(arguments.device)
    batches = ClockedBatches(arguments.steps, device)
    with quiet():
        runs = {name: make(batches, device) for name, make in CONTESTANTS.items()}
    for run in runs.values():
        measure(run, batches)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            times[name].append(measure(run, batches))
    base = times["hand-written loop"]
    print(f"{'':46} {'us/step':>8} {'ratio':>6}   (median of {arguments.rounds} rounds)")
    for name, values in times.items():
        ratio = statistics.median(value / one for value, one in zip(values, base, strict=True))
        print(f"{name:46} {statistics.median(values):8.1f} {ratio:6.3f}")


if __name__ == "__main__":
    main()
