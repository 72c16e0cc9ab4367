"""The cost of a training step compared with a hand-written loop, in microseconds and as a ratio.

A 64-128-10 perceptron, batches of 32, SGD, one thread. All contestants read the same batches from
memory, without a DataLoader. Contestants that log write the mean loss every 50 steps with their
framework's logger; the other work of each one is printed after its figures. All take turns in a
shuffled order within every round. The time starts when an early batch is read and ends when the
last one is read, which excludes the start and the end of a run. Peers take part if they are
installed (`make bench-peers`); JAX reads copies of the batches that were made in advance.

    python benchmarks/step_overhead.py [--device cuda] [--steps 1000] [--rounds 25]
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import Report, parse_options
from torch import Tensor, nn
from turns import take_turns

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
Run = Callable[[], None]
WARM_UP = 100
LOG_EVERY_STEPS = 50


class ClockedBatches(Sequence[Batch]):
    """Batches in memory that record when the first one after the warm-up and the last are read.

    Every contestant uses them as its data loader.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 32, 64, generator=generator).to(device)
        targets = torch.randint(10, (64, 32), generator=generator).to(device)
        pool = list(zip(inputs, targets, strict=True))
        self.batches = [pool[i % len(pool)] for i in range(WARM_UP + steps + 1)]
        # mmengine reads this attribute.
        self.dataset = self.batches
        # Waits for queued steps before the clock is read.
        self.synchronize: Callable[[], object] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        self.marks: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        if index == WARM_UP or index == len(self.batches) - 1:
            self.synchronize()
            self.marks[index] = time.perf_counter()
        return self.batches[index]

    def us_per_step(self) -> float:
        seconds = self.marks[len(self) - 1] - self.marks[WARM_UP]
        return seconds / (len(self) - 1 - WARM_UP) * 1e6


Maker = Callable[[ClockedBatches, torch.device], Run]


class Contestant(NamedTuple):
    make: Maker
    does: str


CONTESTANTS: dict[str, Contestant] = {}


def contestant(name: str, does: str, needs: Sequence[str] = ()) -> Callable[[Maker], Maker]:
    """Register a function that makes a contestant, if the packages that it needs are installed."""

    def register(make: Maker) -> Maker:
        if all(importlib.util.find_spec(package) for package in needs):
            CONTESTANTS[name] = Contestant(make, does)
        return make

    return register


class MeanLoss:
    """Logs the mean of the last 50 losses, for frameworks that leave this to the user."""

    def __init__(self, write: Callable[[float, int], object]) -> None:
        self.write = write
        self.total = torch.zeros(())
        self.steps = 0

    def add(self, loss: Tensor) -> None:
        self.total = self.total + loss.detach()
        self.steps += 1
        if self.steps % LOG_EVERY_STEPS == 0:
            self.write(self.total.item() / LOG_EVERY_STEPS, self.steps)
            self.total = torch.zeros(())


def make_parts(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


@contestant("hand-written loop", "no log")
def hand_written(batches: ClockedBatches, device: torch.device) -> Run:
    net, optimizer = make_parts(device)
    loss_function = nn.CrossEntropyLoss()

    def run() -> None:
        net.train()
        for inputs, target in batches:
            loss = loss_function(net(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


@contestant("stepwrap wrapper", "no log, in a hand-written loop")
def wrapper(batches: ClockedBatches, device: torch.device, loss_weight: str | None = None) -> Run:
    net, optimizer = make_parts(device)
    model = SingleDevice(SupervisedModel(net, nn.CrossEntropyLoss()).to(device))
    optim_wrapper = OptimWrapper(optimizer, loss_weight=loss_weight)

    def run() -> None:
        model.train()
        for batch in batches:
            model.train_step(batch, optim_wrapper)

    return run


for weight in ("samples", "tokens"):
    contestant(f"stepwrap wrapper, loss_weight: {weight}", "no log, in a hand-written loop")(
        partial(wrapper, loss_weight=weight)
    )


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


@contestant("stepwrap loop, no hooks", "mean of the loss every 50 steps, not written")
def bare_loop(batches: ClockedBatches, device: torch.device) -> Run:
    return lambda: run_loop(batches, device, list)


@contestant(
    "stepwrap loop, default hooks",
    "log to JSON and CSV, progress, throughput, checkpoint at the end",
)
def default_loop(batches: ClockedBatches, device: torch.device) -> Run:
    return lambda: run_loop(batches, device, lambda: [make() for make in HOOKS_BY_DEFAULT])


@contestant("ignite Engine", "log to TensorBoard", needs=("ignite", "tensorboard"))
def ignite_engine(batches: ClockedBatches, device: torch.device) -> Run:
    from ignite.engine import Engine
    from ignite.handlers import TensorboardLogger

    net, optimizer = make_parts(device)
    loss_function = nn.CrossEntropyLoss()

    def run() -> None:
        net.train()
        with tempfile.TemporaryDirectory() as folder:
            logger = TensorboardLogger(log_dir=folder)
            mean = MeanLoss(lambda loss, step: logger.writer.add_scalar("loss", loss, step))

            def step(engine: object, batch: Batch) -> Tensor:
                loss = loss_function(net(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean.add(loss)
                return loss.detach()

            Engine(step).run(batches, max_epochs=1)
            logger.close()

    return run


@contestant("accelerate", "log to TensorBoard", needs=("accelerate", "tensorboard"))
def accelerate_loop(batches: ClockedBatches, device: torch.device) -> Run:
    from accelerate import Accelerator

    def train(accelerator: Accelerator) -> None:
        net, optimizer = accelerator.prepare(*make_parts(device))
        loss_function = nn.CrossEntropyLoss()
        mean = MeanLoss(lambda loss, step: accelerator.log({"loss": loss}, step))
        net.train()
        for inputs, target in batches:
            with accelerator.accumulate(net):
                loss = loss_function(net(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            mean.add(loss)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            accelerator = Accelerator(
                cpu=device.type == "cpu", log_with="tensorboard", project_dir=folder
            )
            accelerator.init_trackers("run")
            train(accelerator)
            accelerator.end_training()

    return run


@contestant(
    "mmengine Runner, default hooks",
    "log to JSON, timers, checkpoint at the end",
    needs=("mmengine",),
)
def mmengine_runner(batches: ClockedBatches, device: torch.device) -> Run:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = make_parts(device)
            self.loss_function = nn.CrossEntropyLoss()

        def forward(
            self, inputs: Tensor, target: Tensor, mode: str = "tensor"
        ) -> dict[str, Tensor]:
            return {"loss": self.loss_function(self.net(inputs), target)}

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(
                model=Model(),
                work_dir=folder,
                train_dataloader=batches,
                train_cfg={"by_epoch": True, "max_epochs": 1},
                optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}},
                default_hooks={"logger": {"type": "LoggerHook", "interval": LOG_EVERY_STEPS}},
                log_processor={"window_size": LOG_EVERY_STEPS},
                experiment_name=f"round_{time.monotonic_ns()}",
                log_level="ERROR",
            )
            assert runner.train_loop.dataloader is batches
            runner.train()

    return run


@contestant("torchtnt AutoUnit", "log to TensorBoard", needs=("torchtnt", "tensorboard"))
def torchtnt_unit(batches: ClockedBatches, device: torch.device) -> Run:
    from torchtnt.framework import AutoUnit, train
    from torchtnt.utils.loggers import TensorBoardLogger

    class Unit(AutoUnit):
        def __init__(self, folder: str) -> None:
            super().__init__(module=make_parts(device)[0], device=device, clip_grad_norm=None)
            self.loss_function = nn.CrossEntropyLoss()
            self.logger = TensorBoardLogger(folder)
            self.mean = MeanLoss(lambda loss, step: self.logger.log("loss", loss, step))

        def configure_optimizers_and_lr_scheduler(
            self, module: nn.Module
        ) -> tuple[torch.optim.Optimizer, None]:
            return torch.optim.SGD(module.parameters(), lr=0.01), None

        def compute_loss(self, state: object, data: Batch) -> tuple[Tensor, None]:
            return self.loss_function(self.module(data[0]), data[1]), None

        def on_train_step_end(self, state: object, data: Batch, step: int, results: object) -> None:
            self.mean.add(results.loss)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            unit = Unit(folder)
            train(unit, batches, max_epochs=1)
            unit.logger.close()

    return run


@contestant(
    "Lightning Trainer",
    "log to CSV, progress bar, checkpoint at the end",
    needs=("pytorch_lightning",),
)
def lightning_trainer(batches: ClockedBatches, device: torch.device, *, bare: bool = False) -> Run:
    import pytorch_lightning as lightning
    from pytorch_lightning.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = make_parts(device)
            self.loss_function = nn.CrossEntropyLoss()
            self.mean = MeanLoss(lambda loss, step: self.log("loss", loss))

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss: Tensor = self.loss_function(self.net(batch[0]), batch[1])
            self.mean.add(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                logger=False if bare else CSVLogger(folder),
                enable_checkpointing=not bare,
                enable_progress_bar=not bare,
                log_every_n_steps=LOG_EVERY_STEPS,
                enable_model_summary=False,
            )
            trainer.fit(Module(), batches)
            assert trainer.train_dataloader is batches

    return run


contestant("Lightning Trainer, bare", "nothing is written", needs=("pytorch_lightning",))(
    partial(lightning_trainer, bare=True)
)


def jitted_step(net: nn.Sequential) -> tuple[list[Any], Callable[..., Any]]:
    """Return the perceptron's weights and `step(weights, inputs, target)` -> (weights, loss)."""
    # Limits JAX to one thread; JAX reads the variable on first use.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    import jax
    import jax.numpy as jnp

    def loss_function(weights: list[jax.Array], inputs: jax.Array, target: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(inputs @ weights[0].T + weights[1])
        logits = jax.nn.log_softmax(hidden @ weights[2].T + weights[3])
        return -jnp.take_along_axis(logits, target[:, None], axis=1).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(
        weights: list[jax.Array], inputs: jax.Array, target: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_function)(weights, inputs, target)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], loss

    return [jnp.array(param.detach().numpy()) for param in net.parameters()], step


@contestant("JAX, jitted step", "no log", needs=("jax",))
def jax_loop(batches: ClockedBatches, device: torch.device) -> Run:
    weights, step = jitted_step(make_parts(torch.device("cpu"))[0])
    import jax
    import jax.numpy as jnp

    copies = {id(batch): tuple(map(jnp.asarray, batch)) for batch in batches.batches}
    pairs = [copies[id(batch)] for batch in batches.batches]

    def run() -> None:
        nonlocal weights
        before = batches.synchronize
        batches.synchronize = lambda: jax.block_until_ready(weights)
        for _, (inputs, target) in zip(batches, pairs, strict=True):
            weights, _ = step(weights, inputs, target)
        batches.synchronize = before

    return run


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(io.StringIO()):
            yield


def measure(run: Run, batches: ClockedBatches) -> float:
    """Return microseconds per step."""
    # Collect the garbage of earlier contestants.
    gc.collect()
    with quiet():
        run()
    return batches.us_per_step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=25)
    options = parse_options(parser, {"steps": 200, "rounds": 5})
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    device = torch.device(options.device)
    batches = ClockedBatches(options.steps, device)
    with quiet():
        steps = {name: contestant.make(batches, device) for name, contestant in CONTESTANTS.items()}
    runs = {name: partial(measure, run, batches) for name, run in steps.items()}
    times = take_turns(runs, options.rounds, warm_up=1)
    Report(options.json).add(
        "a training step",
        "us",
        times,
        "hand-written loop",
        notes={name: contestant.does for name, contestant in CONTESTANTS.items()},
        summary=set(times),
    )


if __name__ == "__main__":
    main()
