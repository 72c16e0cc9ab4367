"""The learning-rate range test (Smith, "Cyclical Learning Rates", 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...loops import Hook, IterTrainLoop, LoopState
from ...registry import named_optimizers
from ..jobs import Job, prepared
from ..parts import build_parts
from ..runner import Runner

# The weight of earlier losses in the smoothed loss.
_SMOOTHING = 0.9
# The test ends when the smoothed loss is this many times its minimum.
_DIVERGED = 4.0
# Updates at the beginning that the suggestion ignores: their smoothed losses are too noisy.
_IGNORED = 5


@dataclass(frozen=True)
class RangeTest:
    """The losses of a training whose learning rate rises exponentially.

    Attributes:
        rates: the learning rate of each update.
        losses: the smoothed loss of each update, averaged over the ranks.
        diverged: whether the loss rose so much that the test ended early.
    """

    rates: list[float]
    losses: list[float]
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the loss falls fastest; None if it never falls."""
        falls = {
            at: self.losses[at + 1] - self.losses[at - 1]
            for at in range(_IGNORED, self.lowest)
            if at + 1 < len(self.losses)
        }
        at = min(falls, key=lambda one: falls[one], default=None)
        return None if at is None or falls[at] >= 0 else self.rates[at]

    @property
    def lowest(self) -> int:
        """The index of the lowest loss."""
        known = range(min(_IGNORED, len(self.losses) - 1), len(self.losses))
        return min(known, key=lambda one: self.losses[one])


class RangeTestHook(Hook):
    """Raise the learning rate at each update, and record the losses.

    The ratios between the rates of parameter groups are kept; ``rates`` are the highest ones.

    Args:
        first: the learning rate of the first update.
        last: the learning rate of the last update.
        steps: number of updates.
        optimizer: the name of the optimizer whose rate rises, if there are several.
    """

    # Before other hooks.
    order = 5

    def __init__(self, first: float, last: float, steps: int, optimizer: str = "") -> None:
        self._first, self._factor = first, (last / first) ** (1 / max(1, steps - 1))
        self._optimizer = optimizer
        self._mean = 0.0
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = False

    def on_train_start(self, state: LoopState) -> None:
        wrapper = state.optim_wrapper
        self._groups = (wrapper[self._optimizer] if self._optimizer else wrapper).param_groups
        highest = max(float(group["lr"]) for group in self._groups) or 1.0
        self._ratios = [float(group["lr"]) / highest or 1.0 for group in self._groups]
        self._set(self._first)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if "loss" not in record:
            found = ", ".join(record)
            raise KeyError(f"lr-find needs a train_step that logs 'loss', but it logs {found}")
        loss = record["loss"]
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        self.rates.append(self._rate)
        # Corrects the start from 0, as in Adam.
        self.losses.append(self._mean / (1 - _SMOOTHING ** (len(self.losses) + 1)))
        best = min(self.losses)
        if not math.isfinite(loss) or (best > 0 and self.losses[-1] > _DIVERGED * best):
            if not math.isfinite(loss):
                self.rates.pop()
                self.losses.pop()
            self.diverged = True
            state.request_stop("the loss diverged")
        self._set(self._rate * self._factor)

    def _set(self, rate: float) -> None:
        self._rate = rate
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            group["lr"] = rate * ratio


def run_range_test(job: Job, first: float, last: float, steps: int, optimizer: str) -> RangeTest:
    """Train with a rising learning rate; every rank must call this. Nothing is written."""
    run = replace(job.run, schedulers=[], run_dir="", hooks={})
    with prepared(job):
        parts = build_parts(run, ("train",))
        hook = RangeTestHook(first, last, steps, optimizer)
        loop = IterTrainLoop(
            parts["train_loop"].dataloader, max_steps=steps, log_every_steps=1, sanity_val=False
        )
        kept: dict[str, Any] = {name: parts[name] for name in ("model", "optim_wrapper", "seed")}
        Runner(train_loop=loop, hooks=[*parts["hooks"].values(), hook], **kept).train()
    return RangeTest(hook.rates, hook.losses, hook.diverged)


def optimizer_names(optimizer: dict[str, Any] | None) -> list[str]:
    """Return the names of the optimizers, [""] for a single one."""
    return list(named_optimizers(optimizer or {})) or [""]


def draw_range_test(result: RangeTest, path: Path) -> None:
    """Draw the loss over the learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot(result.rates, result.losses)
    if result.suggestion is not None:
        panel.axvline(
            result.suggestion, color="C1", linestyle="--", label=f"{result.suggestion:.2g}"
        )
        panel.legend(title="suggestion")
    panel.set_xscale("log")
    panel.set_xlabel("learning rate")
    panel.set_ylabel("smoothed loss")
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
