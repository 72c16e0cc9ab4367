"""When to save checkpoints, and which of them to keep."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ...collectives import all_gather_object, broadcast, get_rank
from ...registry import HOOKS
from ...wrappers.layout import reshard
from ..checkpoints.checkpoint import (
    list_checkpoints,
    prune_checkpoints,
    save_alone,
    save_checkpoint,
)
from ..checkpoints.files import CheckpointError, make_draft, run_on_all_ranks
from ..checkpoints.weights import has_sharded_state
from ..hook import Hook
from ..metrics.evaluation import WatchedMetric
from ..schedule import Cadence
from ..state import LoopState
from .nan_guard import NonFiniteError, bad_parameter

logger = logging.getLogger(__name__)


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Save checkpoints into ``<run_dir>/checkpoints``; every rank must have this hook.

    Saves at the given intervals, at the end of the run, and when a signal stops it. A validation at
    the same update or epoch comes first. If the weights are not all finite, nothing is saved: a
    warning names the first bad parameter, and earlier checkpoints are kept. Does nothing if
    ``state.run_dir`` is None. Checks when training starts that the folder is writable.

    Args:
        every_steps: optimizer updates between two checkpoints; None for never.
        every_epochs: passes over the data between two checkpoints; None for never.
        every_secs: seconds of training between two checkpoints; None for never.
        keep_last: the number of latest checkpoints to keep; None for all.
        keep_best: a validation metric. Each validation that improves it is followed by a
            checkpoint, and the best checkpoint is kept as well.
        mode: "max" if higher values of that metric are better, "min" if lower; default: by the
            metric's ``higher_is_better``, or by its name ("loss", "error", "accuracy").
        save_on_exception: save when training fails, too. Rank 0 saves without communication
            (``save_alone``), except after a NonFiniteError, CheckpointError or KeyboardInterrupt.

    Raises:
        ValueError: an interval, ``keep_last`` or ``mode`` is not allowed.
    """

    # Called after the hooks that change saved parts at the same event.
    order = 75

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_secs: float | None = 1800.0,
        keep_last: int | None = 3,
        keep_best: str | None = None,
        mode: str | None = None,
        save_on_exception: bool = True,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, or null for all, got {keep_last!r}")
        self._cadence = Cadence(every_steps, every_epochs, every_secs)
        self._keep_last = keep_last
        self.watched = WatchedMetric(keep_best or "", mode, setting="CheckpointHook: keep_best")
        self._save_on_exception = save_on_exception
        self.best: float | None = None
        self._judged_at = -1
        self._saved_at = (-1, -1, -1)
        self._training = False

    def on_train_start(self, state: LoopState) -> None:
        self.watched.start(state)
        self._training = True
        folder = _folder(state)
        if folder is not None:
            # Check now: the first save may be hours away.
            run_on_all_ranks(
                f"making {folder}", lambda: _require_writable(folder) if get_rank() == 0 else None
            )
        if state.step:
            # The run was resumed: a checkpoint of this position exists.
            self._saved_at = _position(state)

    def on_save_point(self, state: LoopState) -> None:
        # Fast path, since this is called after every update: inside a pass and without an interval
        # in steps, a save can be due only by the clock or after a validation.
        waiting = state.clock_s < self._cadence.due_at_s and self._cadence.every_steps is None
        if waiting and state.batch and state.evaluated_at != state.step:
            return
        by_step = self._cadence.due_step(state) and self._saved_at[0] != state.step
        by_epoch = self._cadence.due_epoch(state)
        best = self._is_best(state)
        if by_step or by_epoch or best:
            self._save(state, "interval", is_best=best)

    def on_train_end(self, state: LoopState) -> None:
        if self._saved_at != _position(state):
            self._save(state, "signal" if state.signal else "end", is_best=self._is_best(state))
        self._training = False

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        training, self._training = self._training, False
        harmful = isinstance(error, (NonFiniteError, CheckpointError))
        if not training or harmful or not isinstance(error, Exception):
            return
        folder = _folder(state)
        if folder is not None and self._save_on_exception and get_rank() == 0 and state.step:
            with _launcher_waits():
                _save_after_error(folder, state)

    def best_by(self, state: LoopState) -> str:
        """Describe the best checkpoint, such as "lowest loss"; empty if there is none yet."""
        # A resumed run may have the best value of an earlier metric and watch none itself.
        if self.best is None or not self.watched.name:
            return ""
        return f"{self.watched.extreme(state)} {self.watched.name}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "judged_at": self._judged_at}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.best = state["best"]
        self._judged_at = state["judged_at"]

    def _is_best(self, state: LoopState) -> bool:
        """Return whether a validation has just ended with the best value so far."""
        is_new = state.evaluated_at == state.step and self._judged_at != state.step
        if not self.watched.name or not is_new:
            return False
        self._judged_at = state.step
        value = self.watched.value_in(state.metrics)
        better = self.watched.improves(value, self.best, state)
        if better:
            self.best = value
        return better

    def _save(self, state: LoopState, reason: str, *, is_best: bool) -> None:
        folder = _folder(state)
        if folder is None:
            return
        bad = _bad_weights(state)
        if bad:
            if get_rank() == 0:
                logger.warning("step %d is not saved, because %s", state.step, bad)
            return
        run_on_all_ranks(f"saving step {state.step}", partial(_require_run_dir, folder.parent))
        started_s = perf_counter()
        path = save_checkpoint(folder, state, reason=reason, is_best=is_best)
        state.phase_s["checkpoint"] += perf_counter() - started_s
        self._saved_at = _position(state)
        if get_rank() != 0:
            return
        so_far = f" ({self.best_by(state)} so far)" if is_best else ""
        logger.info("saved checkpoint %s%s", path, so_far)
        if self._keep_last is None:
            return
        best = [path for path, meta in list_checkpoints(folder) if meta["best"]][:1]
        try:
            prune_checkpoints(folder, self._keep_last, best)
        except OSError:
            # The new checkpoint is complete, and an error would be raised on rank 0 only.
            logger.warning("could not remove old checkpoints from %s", folder, exc_info=True)


def _require_writable(folder: Path) -> None:
    """Raise OSError if nothing can be saved into ``folder``; create the run folder."""
    is_new = not folder.exists()
    make_draft(folder).rmdir()
    if is_new:
        folder.rmdir()


def _require_run_dir(run_dir: Path) -> None:
    # Do not create it again: the new folder would contain only a part of the run.
    if get_rank() == 0 and not run_dir.is_dir():
        raise CheckpointError(f"the run folder {run_dir} was removed while the run used it")


def _bad_weights(state: LoopState) -> str:
    """Describe the first weight that is not finite, "" if there is none; every rank must call."""
    reshard(state.model)
    if not has_sharded_state(state):
        # Only rank 0 saves its weights, so only its answer counts.
        return broadcast(bad_parameter(state) if get_rank() == 0 else "")
    return next(filter(None, all_gather_object(bad_parameter(state))), "")


def _save_after_error(folder: Path, state: LoopState) -> None:
    try:
        if any(meta["step"] == state.step for _, meta in list_checkpoints(folder)):
            return
        bad = bad_parameter(state)
        if bad:
            logger.warning("step %d is not saved after the error, because %s", state.step, bad)
            return
        save_alone(folder, state)
    except Exception:
        # The error that stopped the training must not be replaced.
        logger.warning("could not save a checkpoint after the error", exc_info=True)


@contextmanager
def _launcher_waits() -> Iterator[None]:
    """Keep the launcher from ending this rank because another rank failed."""
    folder = os.environ.get("STEPWRAP_LAUNCH_DIR")
    if not folder:
        yield
        return
    marker = Path(folder) / f"saving_{get_rank()}"
    # Without the marker the launcher still waits for some seconds.
    with suppress(OSError):
        marker.touch()
    try:
        yield
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def _folder(state: LoopState) -> Path | None:
    return None if state.run_dir is None else state.run_dir / "checkpoints"


def _position(state: LoopState) -> tuple[int, int, int]:
    return state.step, state.epoch, state.batch
