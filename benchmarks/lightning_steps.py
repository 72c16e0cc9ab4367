"""Time per step under Lightning's ddp strategy and under ours, on one device.

Both train the same network on the same batch with one thread, in turns. The time of a turn is the
median of its steps; ratios are taken within a turn.

    python benchmarks/lightning_steps.py [--device cuda] [--precision bf16-mixed] [--steps 300]
"""

import argparse
import statistics
import time
import warnings
from collections import UserList
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from report import Report, parse_options
from torch import Tensor, nn
from turns import take_turns

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.plugins.lightning import StepStrategy


class Module(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SmallCNN(width=width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(UserList):
    """A list that Lightning treats as one loader; a plain list would be one loader per item."""


class Clock(Callback):
    """Records the end of each step, after waiting for the device."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def median_ms(self) -> float:
        pairs = zip(self.ends[20:], self.ends[19:], strict=False)
        return 1000 * statistics.median(end - before for end, before in pairs)


def run(strategy: Any, args: argparse.Namespace) -> float:
    clock, data = Clock(), Digits("train")
    batch = [data.images[: args.batch], data.labels[: args.batch]]
    trainer = Trainer(
        accelerator="gpu" if args.device.startswith("cuda") else "cpu",
        devices=1,
        strategy=strategy,
        precision=args.precision,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(args.width), Batches([batch] * args.steps))
    return clock.median_ms()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--turns", type=int, default=5)
    args = parse_options(parser, {"steps": 60, "width": 16, "turns": 5})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    strategies = {"Lightning ddp": lambda: "ddp", "stepwrap": StepStrategy}
    runs = {name: lambda make=make: run(make(), args) for name, make in strategies.items()}
    times = take_turns(runs, args.turns)
    Report(args.json).add("a training step", "ms", times, "Lightning ddp")


if __name__ == "__main__":
    main()
