"""The learning-rate range test (Smith, "Cyclical Learning Rates", 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...loops import Hook, IterTrainLoop, LoopState
from ...registry import Config, RunSections, named_optimizers
from ..jobs import prepared
from ..parts import build_parts
from ..runner import Runner

# The decay of the exponential moving average that smooths the losses.
_SMOOTHING = 0.9
# The test ends when the smoothed loss exceeds its minimum by this factor.
_DIVERGED = 4.0
# The suggestion ignores this many updates at the beginning: their smoothed losses are noisy.
_IGNORED = 5


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test: the loss at each learning rate.

    Attributes:
        rates: the learning rate of each update; with parameter groups, the highest of them.
        losses: the smoothed loss of each update, averaged over the ranks.
        diverged: whether the test ended early because the loss rose too much or was not finite.
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
        at = min(falls, key=lambda point: falls[point], default=None)
        return None if at is None or falls[at] >= 0 else self.rates[at]

    @property
    def lowest(self) -> int:
        """The index of the lowest loss after the first, noisy updates."""
        candidates = range(min(_IGNORED, len(self.losses) - 1), len(self.losses))
        return min(candidates, key=lambda point: self.losses[point])


class RangeTestHook(Hook):
    """Increase the learning rate exponentially at each update, and record the losses.

    Parameter groups keep the ratios between their learning rates; if all are 0, they get the same
    rate. ``rates`` records the highest.

    Args:
        low: the learning rate of the first update.
        high: the learning rate of the last update.
        steps: number of updates.
        optimizer: the name of the optimizer whose rate rises, if there are several.
    """

    # Called before other hooks.
    order = 5

    def __init__(self, low: float, high: float, steps: int, optimizer: str = "") -> None:
        self._first, self._factor = low, (high / low) ** (1 / max(1, steps - 1))
        self._optimizer = optimizer
        self._mean = 0.0
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = False

    def on_train_start(self, state: LoopState) -> None:
        wrapper = state.optim_wrapper
        self._groups = (wrapper[self._optimizer] if self._optimizer else wrapper).param_groups
        rates = [float(group["lr"]) for group in self._groups]
        highest = max(rates)
        self._ratios = [rate / highest if highest else 1.0 for rate in rates]
        self._set(self._first)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if "loss" not in record:
            names = ", ".join(record)
            raise KeyError(f"lr-find needs a train_step that logs 'loss', but it logs {names}")
        loss = record["loss"]
        is_finite = math.isfinite(loss)
        if is_finite:
            self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
            self.rates.append(self._rate)
            # Bias correction as in Adam: the moving average starts at 0.
            self.losses.append(self._mean / (1 - _SMOOTHING ** (len(self.losses) + 1)))
        if not is_finite or 0 < _DIVERGED * min(self.losses) < self.losses[-1]:
            self.diverged = True
            state.request_stop("the loss diverged")
        self._set(self._rate * self._factor)

    def _set(self, rate: float) -> None:
        self._rate = rate
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            group["lr"] = rate * ratio


def run_range_test(
    config: Config,
    run: RunSections,
    *,
    low: float,
    high: float,
    steps: int,
    optimizer: str,
    debug: bool = False,
) -> RangeTest:
    """Run a range test without writing any file; every rank must call this.

    Args:
        config: the config.
        run: its checked sections; schedules and the hooks in the section ``hooks`` are left out.
        low: the learning rate of the first update.
        high: the learning rate of the last update.
        steps: number of updates.
        optimizer: the name of the optimizer whose rate rises; "" if there is only one.
        debug: show the log messages of every rank.
    """
    run = replace(run, schedulers=[], run_dir="", hooks={})
    with prepared(config, run, debug=debug):
        parts = build_parts(run, ("train",))
        hook = RangeTestHook(low, high, steps, optimizer)
        loop = IterTrainLoop(
            parts.train_loop.dataloader, max_steps=steps, log_every_steps=1, sanity_val=False
        )
        Runner(
            parts.model,
            loop,
            optim_wrapper=parts.optim_wrapper,
            hooks={**parts.hooks, "range_test": hook},
            seed=parts.seed,
        ).train()
    return RangeTest(hook.rates, hook.losses, hook.diverged)


def optimizer_names(optimizer: dict[str, Any] | None) -> list[str]:
    """Return the names in an optimizer section, or ``[""]`` if it describes one optimizer."""
    return list(named_optimizers(optimizer or {})) or [""]


def draw_range_test(result: RangeTest, path: Path) -> None:
    """Plot the smoothed loss against the learning rate, and save the figure to ``path``."""
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
