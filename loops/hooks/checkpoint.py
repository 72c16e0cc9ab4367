"""When to save checkpoints, and which of them to keep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from ...collectives import CollectiveError, all_gather_object, broadcast, get_rank
from ...registry import HOOKS
from ...wrappers.layout import reshard
from ..checkpoints.background import CheckpointWriter
from ..checkpoints.checkpoint import list_checkpoints, prune_checkpoints
from ..checkpoints.files import (
    CheckpointError,
    launcher_waits,
    make_draft,
    run_on_all_ranks,
    save_lock,
)
from ..checkpoints.save import collect, save_alone
from ..checkpoints.weights import has_sharded_state
from ..hook import Hook
from ..metrics.evaluation import WatchedMetric
from ..schedule import Cadence
from ..skipping.rollback import Rollback
from ..state import LoopState
from .nan_guard import NonFiniteError, bad_parameter

logger = logging.getLogger(__name__)

# Seconds to wait for a save in the background after a rank was lost.
_PATIENCE_S = 10.0


@HOOKS.register_module()
@dataclass(eq=False, repr=False, kw_only=True)
class CheckpointHook(Hook):
    """Save checkpoints into ``<run_dir>/checkpoints``; every rank must have this hook.

    Saves at the given intervals, at the end of the run, and when a signal stops it. A validation at
    the same update or epoch comes first. If the weights are not all finite, nothing is saved: a
    warning names the first bad parameter, and earlier checkpoints are kept. Does nothing if
    ``state.run_dir`` is None. Checks when training starts that the folder is writable.

    The training waits only until the tensors are copied; a thread writes the files. If that fails,
    all ranks raise the error at the same update, about a second later. The end of the training
    waits for the save.

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
        background: write files while the training continues. This needs memory for a copy of what
            is saved. If it is false, or the memory is too small, the training waits for the files.
        while_saving: "wait" or "skip". If a checkpoint is due while another one is written, wait
            for the other one, or skip the new one, unless it is the best or the last one.
        save_timeout_s: seconds after which a rank that is writing or syncing files counts as
            missing.

    Raises:
        ValueError: an interval, ``keep_last``, ``mode``, ``while_saving`` or ``save_timeout_s`` is
            not allowed.
    """

    # Called after the hooks that change saved parts at the same event.
    order = 75

    every_steps: int | None = None
    every_epochs: int | None = 1
    every_secs: float | None = 1800.0
    keep_last: int | None = 3
    keep_best: str | None = None
    mode: str | None = None
    save_on_exception: bool = True
    background: bool = True
    while_saving: Literal["wait", "skip"] = "wait"
    save_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last must be at least 1, or null for all, got {self.keep_last!r}"
            )
        if self.while_saving not in ("wait", "skip"):
            raise ValueError(f'while_saving must be "wait" or "skip", got {self.while_saving!r}')
        if not self.save_timeout_s > 0:
            raise ValueError(f"save_timeout_s must be > 0, got {self.save_timeout_s!r}")
        self._cadence = Cadence(self.every_steps, self.every_epochs, self.every_secs)
        self.watched = WatchedMetric(
            self.keep_best or "", self.mode, setting="CheckpointHook: keep_best"
        )
        self._writer: CheckpointWriter | None = None
        self._has_memory = self.background
        self._is_saving = False
        # Of the save in the background: its step, its remark, and the clock at the last check.
        self._saving_step, self._remark, self._checked_at_s = 0, "", 0.0
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
            if self._writer is None:
                after = partial(self._after_save, state)
                self._writer = CheckpointWriter(after, self.save_timeout_s)
        if state.step:
            # The run was resumed: a checkpoint of this position exists.
            self._saved_at = _position(state)

    def on_save_point(self, state: LoopState) -> None:
        # The clock changes at the same updates on all ranks.
        if self._is_saving and state.clock_s != self._checked_at_s:
            self._check_save(state)
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
        if self._is_saving:
            with _timed(state):
                self._check_save(state, wait=True)
        if self._saved_at != _position(state):
            self._save(state, "signal" if state.signal else "end", is_best=self._is_best(state))
        self._training = False
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        training, self._training = self._training, False
        if isinstance(error, Rollback):
            # The training continues, and so does the save.
            return
        is_ordinary = isinstance(error, Exception)
        harmful = isinstance(error, (NonFiniteError, CheckpointError)) or not is_ordinary
        folder = _folder(state)
        with launcher_waits():
            if self._writer is not None and is_ordinary:
                # If a rank is missing, the thread may wait for it.
                lacks_ranks = isinstance(error, CollectiveError)
                self._writer.wait_alone(_PATIENCE_S if lacks_ranks else self.save_timeout_s)
                self._close()
            if folder is None or harmful or not (training and self.save_on_exception):
                return
            if get_rank() == 0 and state.step:
                _save_after_error(folder, state)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._is_saving = None, False

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
        with _timed(state):
            self._write(folder, state, reason, is_best=is_best)

    def _write(self, folder: Path, state: LoopState, reason: str, *, is_best: bool) -> None:
        """Save in the background, or at once at the end of the training."""
        assert self._writer is not None
        if self._is_saving:
            may_skip = self.while_saving == "skip" and reason == "interval" and not is_best
            self._check_save(state, wait=not may_skip)
        if self._is_saving:
            if get_rank() == 0:
                logger.info(
                    "step %d is not saved: step %d is still being written",
                    *(state.step, self._saving_step),
                )
            return
        snapshot = collect(folder, state, reason=reason, is_best=is_best)
        self._saved_at = _position(state)
        self._remark = f" ({self.best_by(state)} so far)" if is_best else ""
        if self._has_memory and reason == "interval":
            problem = self._writer.start(snapshot)
            if not problem:
                self._is_saving = True
                self._saving_step, self._checked_at_s = state.step, state.clock_s
                state.restored_from = None
                return
            self._has_memory = False
            if get_rank() == 0:
                logger.warning(
                    "the training waits for its checkpoints, because %s; this is also the effect "
                    "of hooks.checkpoint.background: false",
                    problem,
                )
        path = self._writer.write(snapshot)
        state.restored_from = None
        self._report(path)

    def _check_save(self, state: LoopState, *, wait: bool = False) -> None:
        """Report the end of the save in the background; every rank must call this.

        Raises:
            CheckpointError: on every rank, if the save failed.
        """
        assert self._writer is not None
        self._checked_at_s = state.clock_s
        path = self._writer.result(wait=wait)
        if path is not None:
            self._is_saving = False
            self._report(path)

    def _report(self, path: Path) -> None:
        if get_rank() == 0:
            logger.info("saved checkpoint %s%s", path, self._remark)

    def _after_save(self, state: LoopState, path: Path) -> None:
        """Remove older checkpoints, then call ``state.after_save``; called on rank 0."""
        folder = path.parent
        if self.keep_last is not None:
            best = [path for path, meta in list_checkpoints(folder) if meta["best"]][:1]
            try:
                prune_checkpoints(folder, self.keep_last, best)
            except OSError:
                # The new checkpoint is complete.
                logger.warning("could not remove old checkpoints from %s", folder, exc_info=True)
        for tell in state.after_save:
            tell(path)


def _require_writable(folder: Path) -> None:
    """Raise OSError if nothing can be saved into ``folder``; create the run folder."""
    # An interrupted training, or the one before a return to an earlier checkpoint, may still save.
    with save_lock:
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
def _timed(state: LoopState) -> Iterator[None]:
    """Count the time of the block as time of checkpoints."""
    started_s = perf_counter()
    try:
        yield
    finally:
        state.phase_s["checkpoint"] += perf_counter() - started_s


def _folder(state: LoopState) -> Path | None:
    return None if state.run_dir is None else state.run_dir / "checkpoints"


def _position(state: LoopState) -> tuple[int, int, int]:
    return state.step, state.epoch, state.batch
