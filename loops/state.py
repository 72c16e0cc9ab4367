"""The state of a loop: counters, objects to save, requests to stop, and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from ..registry.local_paths import require_local
from ..wrappers.steps.buffers import digest, transient_buffers
from .logs import LogBuffer
from .rng import DataGenerators

if TYPE_CHECKING:
    from ..wrappers.optimizers.loss_weight import LossWeight

_COUNTERS = ("epoch", "batch", "iteration", "step", "evaluated_at")


class Phase(Enum):
    """The activity of a loop."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"
    PREDICT = "predict"


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved in a checkpoint and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a state returned by ``state_dict``."""


@runtime_checkable
class WeightSource(Stateful, Protocol):
    """An entry of ``LoopState.stateful`` whose state contains the weights that evaluations use.

    Attributes:
        evaluated_entry: the key of these weights in the state; empty if evaluations use the
            model's own weights.
    """

    evaluated_entry: str


@runtime_checkable
class PartReader(Stateful, Protocol):
    """An object whose ``load_state_dict`` may read slices of saved tensors instead of whole ones.

    Attributes:
        reads_parts: whether ``load_state_dict`` accepts ``SavedTensor`` objects, which are read
            from disk when they are sliced.
    """

    reads_parts: bool


@dataclass
class DataPlace:
    """The position of the training in its data, in addition to the counters.

    Attributes:
        layout: how the data is split into updates, see ``loops.data.layout``; empty before the
            first training.
        reader: the stateful loader or iterator that reads the batches, if there is one.
        reader_state: the reader's state in a checkpoint, until the loop has restored it.
        generators: the random generators of the loader, its samplers and its data set.
    """

    layout: dict[str, int] = field(default_factory=dict)
    reader: Stateful | None = None
    reader_state: Any = None
    generators: DataGenerators = field(default_factory=DataGenerators)


@dataclass(kw_only=True)
class Counters:
    """Finished batches, updates and passes; only training loops and checkpoints change them.

    The counters advance after the end event: in ``on_batch_end`` ``iteration`` is still this
    batch's index, and in ``on_epoch_end`` ``epoch`` is still this epoch's index. They are up to
    date in ``on_update``, ``on_log``, the evaluation events and ``on_save_point``.

    Attributes:
        epoch: finished passes over the data.
        batch: finished batches of the running epoch.
        iteration: finished batches since the beginning.
        step: finished optimizer updates.
        updated_at: (epoch, batch, iteration) after the last update, where the current accumulation
            window begins; None if unknown.
        in_step: whether a batch is being read or trained on. The counters do not include it yet,
            but it may have changed the random streams and the weights.
        recorded_at: the ``step`` of the last regular log record, not of a training's final one.
    """

    epoch: int = 0
    batch: int = 0
    iteration: int = 0
    step: int = 0
    updated_at: tuple[int, int, int] | None = None
    in_step: bool = False
    recorded_at: int = 0

    @property
    def running_epoch(self) -> int:
        """The number of the running epoch, or of the one that has just ended; the first is 1."""
        return max(1, self.epoch + (self.batch > 0))


@dataclass(kw_only=True)
class RunLength:
    """The length of the run as far as it is known; ``loops.schedule`` sets it.

    Attributes:
        max_epochs: the run's length in epochs.
        max_steps: the run's length in updates.
        max_iterations: the run's length in batches.
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    max_iterations: int | None = None


@dataclass(kw_only=True)
class Requests:
    """Requests to the training loop: to stop, or to skip steps.

    Attributes:
        stop_reason: why the loop should stop; empty if it should not.
        signal: number of the signal that stops the run (SIGTERM, SIGINT); 0 for none.
        skip_steps: numbers of the steps without an update; their batches are read and discarded.
            None if no step is skipped.
        skipped: whether the last step made no update, because it is in ``skip_steps`` or because a
            guard rejected it.
    """

    stop_reason: str = ""
    signal: int = 0
    skip_steps: set[int] | None = None
    skipped: bool = False

    def request_stop(self, reason: str, *, signal: int = 0) -> None:
        """Ask the loop to stop after this update; the first reason is kept.

        Every rank must call this at the same update. Decisions that depend only on reduced logs
        or metrics satisfy this.

        Raises:
            ValueError: ``reason`` is empty.
        """
        if not reason:
            raise ValueError("request_stop needs a reason that can be shown to the user")
        self.stop_reason = self.stop_reason or reason
        self.signal = signal or self.signal

    def request_skips(self, steps: Collection[int]) -> None:
        """Ask the loop to make no update in the steps with these numbers."""
        if self.skip_steps is None:
            self.skip_steps = set()
        self.skip_steps.update(steps)

    def withdraw(self) -> None:
        """Forget all requests, when a training starts."""
        self.stop_reason, self.signal, self.skip_steps, self.skipped = "", 0, None, False


@dataclass(kw_only=True)
class EvalResults:
    """What evaluations found; evaluations set it.

    Attributes:
        phase: the activity of the running loop.
        eval_set: the name of the set that is being evaluated, if there are several (``EvalSets``).
        metrics: results of the last evaluation.
        higher_is_better: whether higher values of a validation metric are better, by its name;
            None if unknown.
        evaluated_at: the ``step`` at which the last validation ended; -1 for never.
        inference_tensors: the evaluations that created tensors under inference mode, by the name of
            the attribute of the model that holds the tensor.
    """

    phase: Phase = Phase.TRAIN
    eval_set: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)
    evaluated_at: int = -1
    inference_tensors: dict[str, str] = field(default_factory=dict)


@dataclass(repr=False)
class LoopState(Counters, RunLength, Requests, EvalResults):
    """The state of a loop; every hook receives it.

    It has the attributes of ``Counters``, ``RunLength``, ``Requests`` and ``EvalResults`` as well.

    Attributes:
        model: the model wrapper (``train_step``, ``val_step``, ``test_step``, ``module``).
        optim_wrapper: the optimizer wrapper; None without training.
        run_dir: the run's folder; None to write nothing.
        precision: creates the context in which evaluations run, unless ``optim_wrapper`` has one.
        loss_weight: the weight of losses in evaluations, unless ``optim_wrapper`` has one.
        dataloader: the loader of the training batches.
        stateful: further objects to save in checkpoints, by name.
        logs: the logs of this rank's training steps since the record at ``recorded_at``.
        clock_s: seconds of training, including the time before a resume. Updated when the ranks
            exchange it, so that it is equal on all of them.
        phase_s: seconds that this rank has spent in each phase since the start, for reports:
            "training" and "evaluation". "data" (waiting for batches) and "hooks" are parts of
            "training"; "checkpoint" is a part of "hooks".
        data: the position of the training in its data.
        together: whether all ranks take part in this step. False for the last batches of a pass if
            this rank has more batches than others (``uneven_inputs``); hooks must not communicate
            then.
        limits: causes that limit the speed of training, with their shares of the time, 0 to 1:
            "loading data", "hook <class>", or "rank <rank>" if the other ranks wait for it. Set by
            ``ThroughputHook``; equal on every rank.
        restored_from: the folder of checkpoints and the serial number of the restored one; None
            after the run has saved the next one.
        settings: the resolved config, or other settings, for loggers.
        first_buffers: hashes of the buffers with ``persistent=False`` at the creation of the state,
            by name. Checkpoints contain those that have changed since.
        media_loggers: functions ``(state, kind, name, item)`` of loggers; kinds are "image",
            "figure" and "text".
        after_save: functions that ``CheckpointHook`` calls on rank 0 with the path of a checkpoint,
            after it was saved and older ones were removed, and before the next save begins. They
            may run in another thread, while the training continues.

    Raises:
        ValueError: ``run_dir`` is a URL.
    """

    model: nn.Module
    optim_wrapper: Any = None
    run_dir: Path | None = None
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_weight: LossWeight | None = None
    dataloader: Any = None
    stateful: dict[str, Stateful] = field(default_factory=dict)
    logs: LogBuffer = field(default_factory=LogBuffer)
    clock_s: float = 0.0
    phase_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    data: DataPlace = field(default_factory=DataPlace)
    together: bool = True
    limits: dict[str, float] = field(default_factory=dict)
    restored_from: tuple[Path, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    first_buffers: dict[str, str] | None = None
    media_loggers: list[Callable[[LoopState, str, str, Any], None]] = field(default_factory=list)
    after_save: list[Callable[[Path], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.run_dir is not None:
            require_local(self.run_dir, "run_dir")
        if self.first_buffers is None:
            buffers = transient_buffers(self.model)
            self.first_buffers = {name: digest(buffer) for name, buffer in buffers.items()}

    def __repr__(self) -> str:
        # A notebook prints what `train` returns.
        stopped = f", stop_reason={self.stop_reason!r}" if self.stop_reason else ""
        counters = f"epoch={self.epoch}, step={self.step}"
        return f"LoopState({counters}, metrics={self.metrics!r}{stopped})"

    def start_session(self, skip_steps: Collection[int], *, in_window: bool) -> None:
        """Withdraw all requests, skip only ``skip_steps``, and drop logs of an earlier training.

        Args:
            in_window: whether an accumulation window has begun.
        """
        self.withdraw()
        if skip_steps:
            self.request_skips(skip_steps)
        self.in_step = False
        self.updated_at = None if in_window else (self.epoch, self.batch, self.iteration)
        self.logs.start()

    def log_image(self, name: str, image: Any) -> None:
        """Log an image with every logger; only calls on rank 0 have an effect.

        Args:
            name: the name of the image, such as "val/input".
            image: a tensor (channels, height, width) or (height, width); an array
                (height, width, channels) or (height, width); or a PIL image. It has 1, 3 or 4
                channels; floats are from 0 to 1, integers from 0 to 255.

        Raises:
            ValueError: the name is not allowed in a file's path, or the image has another shape.
        """
        self._log_media("image", name, image)

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib figure with every logger, without closing it; effective on rank 0 only.

        Raises:
            TypeError: ``figure`` is not a figure.
            ValueError: the name is not allowed in a file's path.
        """
        self._log_media("figure", name, figure)

    def log_text(self, name: str, text: str) -> None:
        """Log a text with every logger; only calls on rank 0 have an effect.

        Raises:
            ValueError: the name is not allowed in a file's path.
        """
        self._log_media("text", name, text)

    def _log_media(self, kind: str, name: str, content: Any) -> None:
        for receive in self.media_loggers:
            receive(self, kind, name, content)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the clock, the last metrics and the data layout."""
        counters = {name: getattr(self, name) for name in (*_COUNTERS, "recorded_at", "clock_s")}
        return {**counters, "metrics": dict(self.metrics), "data_layout": dict(self.data.layout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; a request to stop is not part of it."""
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        # Older checkpoints lack this entry and the logs since the last record.
        self.recorded_at = int(state.get("recorded_at", self.step))
        self.data.layout = {name: int(n) for name, n in state.get("data_layout", {}).items()}
        self.updated_at = None
        self.clock_s = float(state["clock_s"])
        self.metrics = {name: float(value) for name, value in state["metrics"].items()}
