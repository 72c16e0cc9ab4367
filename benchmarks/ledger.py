"""The cost of a ledger in a training step of the digits CNN, in microseconds and as a ratio.

Batches of 64 in memory, AdamW. The runs take turns within every round, in a shuffled order; ratios
are relative to the run without a ledger. On the CPU the processor time of one thread is measured,
on a GPU the wall-clock time.

    python benchmarks/ledger.py [--device cuda] [--steps 200] [--rounds 15]
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from report import Report, parse_options
from torch import nn
from turns import take_turns

from stepwrap.configs.digits import Digits, SmallCNN
from stepwrap.diagnostics import LedgerHook
from stepwrap.loops import EpochTrainLoop, Hook, HookList, LoopState
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

BATCH = 64
LEDGERS = {
    "no ledger": None,
    "stepwrap, every_steps: 10": {"every_steps": 10},
    "stepwrap, every_steps: 1": {"every_steps": 1},
    "stepwrap, every_steps: 1, full": {"every_steps": 1, "full": True},
}


class Clock(Hook):
    """Records the start and the end of the steps, without the start and end of the run."""

    order = 1

    def on_epoch_start(self, state: LoopState) -> None:
        self.start_s = self._now(state)

    def on_epoch_end(self, state: LoopState) -> None:
        self.end_s = self._now(state)

    def _now(self, state: LoopState) -> float:
        if next(state.model.parameters()).is_cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        # One thread computes and nothing waits, so processor time excludes other programs.
        return time.process_time()


def us_per_step(batches: list[tuple[torch.Tensor, ...]], settings: dict | None) -> float:
    torch.manual_seed(0)
    device = batches[0][0].device
    model = SupervisedModel(SmallCNN(), nn.CrossEntropyLoss()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    clock = Clock()
    hooks = [clock] if settings is None else [clock, LedgerHook(**settings)]
    with tempfile.TemporaryDirectory() as folder:
        state = LoopState(
            model=SingleDevice(model), optim_wrapper=OptimWrapper(optimizer), run_dir=Path(folder)
        )
        EpochTrainLoop(batches, max_epochs=1).run(state, HookList(hooks))
    return (clock.end_s - clock.start_s) / len(batches) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parse_options(parser, {"steps": 50, "rounds": 5})
    torch.set_num_threads(1)
    data = Digits("train")
    images, labels = data.images.to(options.device), data.labels.to(options.device)
    count = len(labels) // BATCH
    pool = [(images[i::count][:BATCH], labels[i::count][:BATCH]) for i in range(count)]
    batches = [pool[i % count] for i in range(options.steps)]
    for settings in LEDGERS.values():
        us_per_step(batches[:20], settings)
    runs = {name: partial(us_per_step, batches, settings) for name, settings in LEDGERS.items()}
    Report(options.json).add("a training step", "us", take_turns(runs, options.rounds), "no ledger")


if __name__ == "__main__":
    main()
