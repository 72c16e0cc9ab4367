"""What a loop remembers: counters, the parts it drives, requests to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from .logs import LogBuffer

_COUNTERS = ("epoch", "batch", "iteration", "step", "evaluated_at")


class Phase(Enum):
    """What the running loop is doing."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be written into a checkpoint and read back.

    One that has evaluations use other weights than the model's own tells by an attribute
    `evaluated_entry` under which key of its state they are.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take over a state returned by `state_dict`."""


class Optimization(Protocol):
    """What the loops need of an optimizer wrapper."""

    def should_update(self) -> bool:
        """Say, right after a training step, whether the weights were updated."""

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Learn the batches done and the batches in all (-1: not known)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state returned by `state_dict`."""


@dataclass
class LoopState:
    """What a loop remembers; every hook receives it.

    The counters count finished things. They advance after the end event of
    what they count: in `on_batch_end` `iteration` still is this batch's index,
    in `on_epoch_end` `epoch` still is this epoch's index; in `on_update`,
    `on_log`, the evaluation events and `on_save_point` all of them are up to
    date.

    Attributes:
        model: The model wrapper (`train_step`, `val_step`, `test_step`, `module`).
        optim_wrapper: The optimizer wrapper; None where nothing is trained.
        precision: Makes the context that evaluations run in where `optim_wrapper` does not tell.
        run_dir: The run's folder; None when nothing is to be written.
        stateful: Further things that belong into a checkpoint, by name.
        epoch: Finished passes over the data.
        batch: Batches done in the running epoch.
        iteration: Batches done in all.
        step: Optimizer updates done.
        max_epochs: The run's length in epochs, where known.
        max_steps: The run's length in updates, where known.
        phase: What the running loop is doing.
        metrics: Results of the last evaluation.
        higher_is_better: Whether higher values of a metric of the validation are better, by its
            name; None where neither the metric nor its name tells.
        evaluated_at: `step` at which the last validation ended; -1 for never.
        recorded_at: `step` at which the last log record of a full interval was made.
        logs: What the training steps have logged since then, on this rank.
        clock_s: Seconds of training as of the last agreement between the
            ranks: equal on all of them, and kept over a resume.
        stop_reason: Why the loop is to stop; empty while it is not.
        signal: Number of the signal that stops the run (SIGTERM, SIGINT); 0 for none.
        in_step: A batch is being read or trained on: it is not in the counters yet, but maybe in
            the random streams and the weights.
        together: All ranks are in this step. False in the last batches of a pass in which this
            rank has more than others (`uneven_inputs`): hooks must not communicate then.
        updated_at: (epoch, batch, iteration) of the last update, where the running
            accumulation window began; None where that is not known.
        restored_from: Folder and serial number of the checkpoint that the run
            has gone back to and not yet gone on from.
    """

    model: nn.Module
    optim_wrapper: Optimization | None = None
    run_dir: Path | None = None
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    stateful: dict[str, Stateful] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    iteration: int = 0
    step: int = 0
    max_epochs: int | None = None
    max_steps: int | None = None
    phase: Phase = Phase.TRAIN
    metrics: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)
    evaluated_at: int = -1
    recorded_at: int = 0
    logs: LogBuffer = field(default_factory=LogBuffer)
    clock_s: float = 0.0
    stop_reason: str = ""
    signal: int = 0
    in_step: bool = False
    together: bool = True
    updated_at: tuple[int, int, int] | None = None
    restored_from: tuple[Path, int] | None = None

    @property
    def running_epoch(self) -> int:
        """The number of the epoch that is running, or has just ended; the first is 1."""
        return max(1, self.epoch + (self.batch > 0))

    def request_stop(self, reason: str) -> None:
        """Ask the loop to stop after this update; the first reason stays.

        With several ranks every rank must ask at the same update, as it happens
        by itself where the decision rests on reduced logs or metrics.
        """
        if not reason:
            raise ValueError("request_stop needs a reason that can be shown to the user")
        self.stop_reason = self.stop_reason or reason

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the clock and the last metrics."""
        counters = {name: getattr(self, name) for name in _COUNTERS}
        more = {"recorded_at": self.recorded_at, "clock_s": self.clock_s}
        return {**counters, **more, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counters of a checkpoint; a request to stop is not among them."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        # Older checkpoints hold nothing of the logs since the last record.
        self.recorded_at = int(state.get("recorded_at", self.step))
        self.updated_at = None
        self.clock_s = float(state["clock_s"])
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
