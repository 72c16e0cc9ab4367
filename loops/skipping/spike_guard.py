"""Skip updates whose loss or gradient norm is an outlier."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import comm_device, distributed_available, get_rank, get_world_size
from ...primitives.tensor_bits import widened
from ...registry import HOOKS
from ...wrappers import OptimWrapper
from ...wrappers.features import optim_features
from ...wrappers.layout import gradient_norm
from ..checkpoints.restore import find_checkpoint, load_checkpoint
from ..hook import Hook, Scalars
from ..state import LoopState
from ..undo import window_restorer
from .rollback import Rollback

logger = logging.getLogger(__name__)

_WATCHED = ("loss", "grad_norm")
# The minimum deviation as a share of the median, since equal values have a deviation of 0.
_MIN_DEVIATION = 0.01


@dataclass
class _Series:
    """The losses or gradient norms of the last steps; each is the highest value of any rank."""

    name: str
    threshold: float
    warmup: int
    accepted: deque[float]

    def judge(self, values: Sequence[float]) -> str:
        """Describe the highest value of the ranks if it is an outlier; otherwise return ""."""
        heights = [value if math.isfinite(value) else math.inf for value in values]
        rank = heights.index(max(heights))
        value, text = values[rank], f"{self.name} {values[rank]:.5g} on rank {rank}"
        if not math.isfinite(value):
            return text
        if len(self.accepted) < self.warmup:
            return ""
        middle = median(self.accepted)
        mad = median(abs(value - middle) for value in self.accepted)
        deviation = max(mad, _MIN_DEVIATION * abs(middle))
        bound = middle + self.threshold * deviation
        if value <= bound:
            return ""
        return f"{text} is above {bound:.5g} (median {middle:.5g}, deviation {deviation:.3g})"


class SpikeError(ArithmeticError):
    """Too many steps in a row are outliers, so that skipping steps does not help."""


class StepGuard(Hook):
    """Base class of hooks that decide with all ranks, before each update, whether to skip it.

    After a skipped step, the run continues as if the batches of its accumulation window did not
    exist. The log records get ``skipped_steps``, the number of skipped steps since the last one.
    A subclass overrides ``allows``, which calls ``skip``.

    Args:
        max_in_row: the allowed number of skipped steps in a row.
    """

    # Called after the hooks that save or evaluate, which may draw random numbers.
    order = 90

    def __init__(self, max_in_row: int) -> None:
        self._max_in_row = max_in_row
        self._in_row = self._count = 0
        self._losses: list[Tensor] = []
        self._refused = False

    def on_train_start(self, state: LoopState) -> None:
        optim = state.optim_wrapper
        if not isinstance(optim, OptimWrapper) or optim.needs_closure:
            single = optim.optimizer if isinstance(optim, OptimWrapper) else optim
            kind = "several optimizers" if isinstance(optim, Mapping) else type(single).__name__
            raise TypeError(
                f"{type(self).__name__} needs one OptimWrapper with an optimizer that takes no "
                f"closure, got {kind}; use train.skip_steps to skip steps of other optimizers"
            )
        if optim.guard not in (None, self):
            raise TypeError(
                f"{type(self).__name__} and {type(optim.guard).__name__} exclude each other, since "
                "both decide on updates: remove one of them; SpikeGuardHook also skips steps with "
                "NaN or infinity"
            )
        self._state, optim.guard = state, self
        self._losses, self._refused = [], False
        self._undo = window_restorer(state)

    def on_epoch_start(self, state: LoopState) -> None:
        self.on_save_point(state)

    def on_save_point(self, state: LoopState) -> None:
        # The last event before the next batch is read.
        if state.updated_at is not None and state.updated_at[2] == state.iteration:
            self._undo = window_restorer(state)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        if self._refused:
            self._refused = False
            self._undo()
            state.logs.drop(state.step + 1)

    def on_update(self, state: LoopState) -> None:
        self._count += state.skipped

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        scalars["skipped_steps"] = float(self._count)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if state.recorded_at == state.step:
            self._count = 0

    def on_train_end(self, state: LoopState) -> None:
        state.optim_wrapper.guard = None

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        if optim_features(state.optim_wrapper).guard is self:
            state.optim_wrapper.guard = None

    def note(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch."""
        self._losses.append(loss)

    def skip(self) -> None:
        """Mark the step as skipped; ``allows`` must return False then."""
        self._state.skipped = self._refused = True

    def take_losses(self) -> list[Tensor]:
        """Return the losses of the window, and begin the next one."""
        losses, self._losses, self._state.skipped = self._losses, [], False
        return losses

    def allows(self, optim_wrapper: OptimWrapper) -> bool:
        """Return whether to update, the same on all ranks; every rank must call this."""
        raise NotImplementedError


@HOOKS.register_module()
class SpikeGuardHook(StepGuard):
    """Skip the steps whose loss or gradient norm is an outlier, NaN or infinite.

    All ranks decide together before the update. A value is an outlier if it is above ``median +
    threshold * MAD`` of the last ``window`` steps, without the skipped ones. MAD is the median
    absolute deviation, but at least 1% of the median; the value of a step is the highest of any
    rank. After a skipped step, the run continues as if the batches of its accumulation window did
    not exist; see docs/hooks.md. Each step costs a small collective and waits for the device. The
    hook adds ``skipped_steps`` to the log records: the number of skipped steps since the last one.

    Args:
        threshold: the number of median absolute deviations above the median.
        window: the number of previous steps that a value is compared with (not an accumulation
            window).
        warmup: the number of steps before the first comparison. NaN and infinity are always
            outliers.
        watch: "both", "loss" or "grad_norm".
        before: the number of steps before an outlier to skip as well. The run goes back to the
            latest checkpoint before them, if there is one.
        after: the number of steps after an outlier to skip as well.
        max_in_row: the allowed number of outliers in a row. One more raises SpikeError.

    Raises:
        ValueError: an argument is not allowed.
        TypeError: when training starts: there are several optimizers, or one needs a closure.
    """

    def __init__(
        self,
        *,
        threshold: float = 20.0,
        window: int = 128,
        warmup: int = 32,
        watch: str = "both",
        before: int = 0,
        after: int = 0,
        max_in_row: int = 10,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"SpikeGuardHook: threshold must be above 0, got {threshold!r}")
        if watch not in ("both", *_WATCHED):
            raise ValueError(
                f"SpikeGuardHook: watch must be both, loss or grad_norm, got {watch!r}"
            )
        if not 2 <= warmup <= window:
            raise ValueError(
                f"SpikeGuardHook: warmup must be from 2 to window ({window}), got {warmup!r}"
            )
        for name, value in (("before", before), ("after", after), ("max_in_row", max_in_row)):
            if value < 0:
                raise ValueError(f"SpikeGuardHook: {name} must be at least 0, got {value!r}")
        super().__init__(max_in_row)
        self._around = before, after
        self._series = [
            _Series(name, threshold, warmup, deque(maxlen=window))
            for name in _WATCHED
            if watch in ("both", name)
        ]
        self._skip_steps: set[int] = set()

    def on_train_start(self, state: LoopState) -> None:
        super().on_train_start(state)
        if self._skip_steps or any(self._around):
            state.request_skips(self._skip_steps)

    def state_dict(self) -> dict[str, Any]:
        accepted = {series.name: list(series.accepted) for series in self._series}
        # "made" has the accepted values and "left_out" the steps to skip; the keys are older names.
        return {"made": accepted, "left_out": sorted(self._skip_steps), "count": self._count}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        for series in self._series:
            series.accepted.clear()
            series.accepted.extend(state["made"].get(series.name, ()))
        # After a rollback the run has found more steps to skip than its checkpoint has.
        self._skip_steps |= set(state["left_out"])
        self._count = state["count"]

    def allows(self, optim_wrapper: OptimWrapper) -> bool:
        state, losses = self._state, self.take_losses()
        if not state.together:
            return True
        names = [series.name for series in self._series]
        columns = list(zip(*group_by_rank(_measured(names, losses, optim_wrapper)), strict=True))
        pairs = list(zip(self._series, columns, strict=True))
        reasons = {series.name: text for series, values in pairs if (text := series.judge(values))}
        if reasons.keys() == {"grad_norm"} and _overflows(optim_wrapper, columns[-1]):
            return True
        if reasons:
            self._refuse(state, f"step {state.step + 1}: {', '.join(reasons.values())}")
            return False
        for series, values in pairs:
            series.accepted.append(max(values))
        self._in_row = 0
        return True

    def _refuse(self, state: LoopState, reason: str) -> None:
        """Skip the step; every rank must call this."""
        self._in_row += 1
        if self._in_row > self._max_in_row:
            raise SpikeError(
                f"at most {self._max_in_row} outliers in a row are allowed (max_in_row), got "
                f"{self._in_row}, the last in {reason}; check the data, lower the learning rate, "
                "or raise threshold"
            )
        before, after = self._around
        step = state.step + 1
        if state.skip_steps is not None:
            more = set(range(step - before if before else step + 1, step + after + 1))
            self._skip_steps |= more
            state.request_skips(more)
        if get_rank() == 0:
            logger.warning("skipped %s", reason)
        folder = state.run_dir
        path = find_checkpoint(folder, before=step - before) if before and folder else None
        if path is not None:
            checkpoint = load_checkpoint(path)
            raise Rollback(f"{reason}; going back to {path}", restore=checkpoint.restore)
        if before and get_rank() == 0:
            logger.warning("there is no checkpoint before step %d to go back to", step - before)
        self.skip()


def _measured(
    names: Sequence[str], losses: Sequence[Tensor], optim_wrapper: OptimWrapper
) -> Tensor:
    """Return this rank's values of the step, on the device; every rank must call this."""
    measured = []
    if "loss" in names:
        means = [widened(loss).mean() for loss in losses]
        measured.append(torch.stack(means).mean() if means else torch.zeros(()).double())
    if "grad_norm" in names:
        norm = gradient_norm(optim_wrapper.optimizer) / optim_wrapper.loss_scale
        measured.append(widened(norm))
    device = measured[-1].device
    return torch.stack([value.to(device, measured[-1].dtype) for value in measured])


def group_by_rank(values: Tensor) -> list[list[float]]:
    """Return the values of all ranks, exchanged in one small collective."""
    if not distributed_available() or get_world_size() == 1:
        return [values.tolist()]
    values = values.to(comm_device())
    rows = [torch.empty_like(values) for _ in range(get_world_size())]
    dist.all_gather(rows, values)
    table: list[list[float]] = torch.stack(rows).tolist()
    return table


def _overflows(optim_wrapper: OptimWrapper, norms: Sequence[float]) -> bool:
    """Return whether the loss scale is too high, so that the loss scaler will skip the update."""
    scaler = getattr(optim_wrapper, "loss_scaler", None)
    has_scale = scaler is not None and scaler.is_enabled()
    return has_scale and not all(map(math.isfinite, norms))
