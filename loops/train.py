"""The training loops."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from ..collectives import get_rank
from ..registry import LOOPS
from .checkpoints.restore import load_checkpoint
from .data.layout import lay_out
from .data.loaders import length_of
from .data.places import batches_of_pass, telling
from .evaluate import ValLoop, announce_failure, require_step
from .hook import HookList, Scalars
from .metrics.scores import directions_of
from .notes import naming_missing_ranks, note_failure
from .schedule import (
    ValSchedule,
    holds_gradients,
    is_weighted,
    positive,
    start_counting,
    step_of,
    updates_done,
    window_of,
)
from .signals import StopSignals
from .skips import GoingBack, skipping, steps_of
from .state import LoopState, merged_means
from .uneven import PassInputs

logger = logging.getLogger(__name__)

# Updates after which raw log values are folded, so that a rare log costs no memory.
_FOLD_STEPS = 256

_AT_EACH_STEP = ("on_batch_start", "on_batch_end", "on_update", "on_save_point")

# What a loop calls, and the sign of an optimizer wrapper; steps and checkpoints may need more.
_NEEDED = ("update_params", "should_update", "initialize_count_status")

_EMPTY = "the training loader has no batches: more samples, a smaller batch_size or no drop_last"


class _Blocks:
    """Has a compiled step look for changes of the model once a block, while it is entered.

    A block has at most `steps_per_call` steps, and ends with a record, a validation and a pass.
    Where a hook from elsewhere acts at each step, each is a block of its own.
    """

    def __init__(self, state: LoopState, hooks: HookList, steps_per_call: int) -> None:
        self._look_every: Any = getattr(state.model, "look_every", lambda steps: False)
        self._steps = steps_per_call
        if steps_per_call > 1 and (why := self._obstacle(state, hooks)):
            self._steps = 1
            if get_rank() == 0:
                logger.warning("steps_per_call: %d gains nothing: %s", steps_per_call, why)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self._look_every(1)

    def begin(self) -> None:
        """Begin a block with the next step."""
        self._look_every(self._steps)

    def _obstacle(self, state: LoopState, hooks: HookList) -> str:
        if not self._look_every(1):
            return "the training step is not compiled, as by compile: step"
        if window_of(state.optim_wrapper) != 1:
            return "an update takes several batches (accumulative_counts)"
        listeners = (one for event in _AT_EACH_STEP for one in getattr(hooks, event))
        for owner in (type(getattr(one, "__self__", one)) for one in listeners):
            if not owner.__module__.startswith(f"{__package__}."):
                return f"{owner.__name__} acts at each step, and may change the model"
        return ""


class _TrainLoop:
    # The update after which to stop; None where epochs are counted, and validated by.
    _last_step: int | None = None
    # Found out at the start of each run.
    _inputs: PassInputs
    _blocks: _Blocks
    # The step of the record that ends the run, or where this training began.
    _closed_at = 0
    # Whether the run has come to its end, or a stop.
    _ended = False
    prefetch_to_device = False
    steps_per_call = 1

    def _count(self, state: LoopState) -> None:
        """Tell the state and the optimizer wrapper how long the run will be."""

    def __init__(  # noqa: PLR0913
        self,
        dataloader: Iterable[Any],
        schedule: ValSchedule,
        val_loop: ValLoop | None,
        log_every_steps: int,
        sanity_val: bool,
        skip_steps: Iterable[int | str],
    ) -> None:
        if length_of(dataloader) == 0:
            raise ValueError(_EMPTY)
        self.dataloader = telling(dataloader)
        self.val_loop = val_loop
        self.schedule = schedule
        self.sanity_val = sanity_val
        self.log_every_steps = positive("log_every_steps", log_every_steps)
        self.skip_steps = steps_of(skip_steps)

    def _pass(self, state: LoopState, hooks: HookList, signals: StopSignals) -> None:
        optim = state.optim_wrapper
        self._blocks.begin()
        train_step = step_of(state.model, optim)
        log, weighted = state.logs.append, is_weighted(optim)
        state.in_step = True
        left: Iterable[Any] = batches_of_pass(self.dataloader, state, self.prefetch_to_device)
        if state.skip_steps is not None:
            left, train_step = skipping(left, train_step, state)
        for batch in self._inputs.watched(left, state):
            for on_batch_start in hooks.on_batch_start:
                on_batch_start(state, batch)
            logs = train_step(batch, optim)
            log((state.step + 1, logs, optim.last_weight if weighted else None))
            for on_batch_end in hooks.on_batch_end:
                on_batch_end(state, batch, logs)
            state.iteration += 1
            state.batch += 1
            updated = optim.should_update()
            if updated:
                state.step += 1
                state.updated_at = (state.epoch, state.batch, state.iteration)
            state.in_step = False
            if updated:
                for on_update in hooks.on_update:
                    on_update(state)
                self._after_update(state, hooks, signals)
                if state.stop_reason or state.step == self._last_step:
                    return
            state.in_step = True
        state.in_step = False
        if not state.batch:
            raise ValueError(_EMPTY)

    def _after_update(self, state: LoopState, hooks: HookList, signals: StopSignals) -> None:
        if not state.together:
            return
        if state.step % self.log_every_steps == 0:
            state.recorded_at = state.step
            self._record(state, hooks)
            self._blocks.begin()
            state.logs.clear()
        elif state.step % _FOLD_STEPS == 0:
            state.logs.fold()
        if monotonic() >= signals.due_s:
            signals.poll(state)
        if self._last_step is not None:
            self._validate(state.step, state, hooks, signals)
        for on_save_point in hooks.on_save_point:
            on_save_point(state)

    def _record(self, state: LoopState, hooks: HookList) -> None:
        """Announce the means since the last record; every rank must call this."""
        scalars: Scalars = dict(state.logs.means())
        for collect in hooks.collect_logs:
            collect(state, scalars)
        record = merged_means(scalars, state.logs if is_weighted(state.optim_wrapper) else None)
        for listener in hooks.on_log:
            listener(state, record)

    def _record_rest(self, state: LoopState, hooks: HookList) -> None:
        """Announce the last record of the run, before a validation of the same step.

        Counters decide, since all ranks must agree. The logs are kept: a run that is resumed here
        makes the record of the whole interval.
        """
        if state.step not in (state.recorded_at, self._closed_at):
            self._closed_at = state.step
            self._record(state, hooks)

    def _end_pass(self, state: LoopState) -> None:
        state.epoch += 1
        state.batch = 0
        if state.updated_at is not None and state.updated_at[2] == state.iteration:
            state.updated_at = (state.epoch, 0, state.iteration)

    def _validate(self, done: int, state: LoopState, hooks: HookList, signals: StopSignals) -> None:
        """Validate if due after `done` units; after a stop, the resumed run does it."""
        if self.val_loop is not None and self.schedule.due(done) and not state.stop_reason:
            if done == self.schedule.last:
                self._record_rest(state, hooks)
            self.val_loop.evaluate(state, hooks, signals.poll)
            self._blocks.begin()

    def _catch_up(self, done: int, state: LoopState, hooks: HookList, signals: StopSignals) -> None:
        """Do the validation before or during which an earlier run was stopped."""
        if done and self.schedule.due(done) and state.evaluated_at != state.step:
            self._validate(done, state, hooks, signals)
            for on_save_point in hooks.on_save_point:
                on_save_point(state)

    @contextmanager
    def _session(self, state: LoopState, hooks: HookList) -> Iterator[StopSignals]:
        """Start and end the training of the run, handle signals, announce errors.

        Without an end, the run has gone back to a checkpoint and is to go on from there.
        """
        self._check(state)
        self._count(state)
        state.dataloader = self.dataloader
        state.stop_reason, state.signal, state.in_step = "", 0, False
        state.skip_steps, state.skipped = set(self.skip_steps) or None, False
        state.updated_at = None
        if not holds_gradients(state.model):
            state.updated_at = (state.epoch, state.batch, state.iteration)
        state.logs.start()
        self._closed_at = state.step
        self._blocks = _Blocks(state, hooks, self.steps_per_call)
        with StopSignals(state.clock_s) as signals, self._blocks:
            try:
                with naming_missing_ranks(state):
                    for on_train_start in hooks.on_train_start:
                        on_train_start(state)
                    yield signals
                    if not state.signal:
                        signals.look(state)
                    self._record_rest(state, hooks)
                    for on_train_end in hooks.on_train_end:
                        on_train_end(state)
                    self._ended = True
            except BaseException as error:
                note_failure(error, state, self.dataloader, "train_step")
                announce_failure(state, hooks, error)
                if not isinstance(error, GoingBack):
                    raise
                load_checkpoint(error.checkpoint).restore(state)

    def _check(self, state: LoopState) -> None:
        if state.optim_wrapper is None:
            raise ValueError("training needs an optimizer wrapper, but state.optim_wrapper is None")
        missing = [name for name in _NEEDED if not hasattr(state.optim_wrapper, name)]
        if missing:
            raise TypeError(
                f"{type(state.optim_wrapper).__name__} is no optimizer wrapper, it has no "
                f"{', '.join(missing)}; wrap an optimizer, as in OptimWrapper(optimizer)"
            )
        require_step(state.model, "train_step")
        state.higher_is_better = directions_of(getattr(self.val_loop, "metrics", {}))
        by_epoch = self._last_step is None
        lay_out(state, self.dataloader)
        self._inputs = PassInputs(state, self.dataloader, by_epoch=by_epoch)
        if self.sanity_val and isinstance(self.val_loop, ValLoop):
            self.val_loop.try_batch(state)


@LOOPS.register_module(name=["EpochTrainLoop", "EpochBasedTrainLoop"])
class EpochTrainLoop(_TrainLoop):
    """Trains for a number of passes over the data, validating between passes.

    Args:
        dataloader: This rank's batches; the same number on every rank, unless the model's wrapper
            has `uneven_inputs` or the optimizer wrapper a `loss_weight`. Where the number is not
            known in advance, or only estimated, as for an iterable data set, the ranks compare
            before each batch whether all have one. docs/checkpoints.md tells how a resumed run
            finds its place in any loader.
        max_epochs: Passes over the data.
        val_loop: Validates; None for never.
        val_begin: The first epoch after which it may run.
        val_interval: Epochs between two validations; there is always one after the last epoch.
        dynamic_intervals: (epoch, val_interval) pairs: from that epoch on, another interval.
        log_every_steps: Updates between two log records.
        sanity_val: Run one batch of the validation before training, to find mistakes in it; see
            `ValLoop.try_batch`.
        skip_steps: Steps that make no update, by their numbers in the log records, or as ranges
            such as "1200-1210". They count like all others; docs/hooks.md.
        prefetch_to_device: Copy each batch to the model's CUDA device on a stream of its own, and
            read it before the step before it where no resumed run could tell; docs/configs.md.
        steps_per_call: Before so many steps a compiled step looks once for changes of the model,
            unless hooks from elsewhere act at each step; docs/performance.md.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataloader: Iterable[Any],
        *,
        max_epochs: int,
        val_loop: ValLoop | None = None,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        log_every_steps: int = 50,
        sanity_val: bool = True,
        skip_steps: Sequence[int | str] = (),
        prefetch_to_device: bool = False,
        steps_per_call: int = 1,
    ) -> None:
        schedule = ValSchedule("epochs", max_epochs, val_begin, val_interval, dynamic_intervals)
        super().__init__(dataloader, schedule, val_loop, log_every_steps, sanity_val, skip_steps)
        self.prefetch_to_device = prefetch_to_device
        self.steps_per_call = positive("steps_per_call", steps_per_call)
        self.max_epochs = schedule.last

    def run(self, state: LoopState, hooks: HookList) -> LoopState:
        """Train until `max_epochs` or a stop, from where `state` is; every rank must call this."""
        self._ended = False
        while not self._ended:
            with self._session(state, hooks) as signals:
                if not state.batch and self.val_loop is not None:
                    self._catch_up(state.epoch, state, hooks, signals)
                while state.epoch < self.max_epochs and not state.stop_reason:
                    for on_epoch_start in hooks.on_epoch_start:
                        on_epoch_start(state)
                    state.model.train()
                    with self._inputs.joined(state):
                        self._pass(state, hooks, signals)
                    if state.stop_reason:
                        break
                    for on_epoch_end in hooks.on_epoch_end:
                        on_epoch_end(state)
                    self._end_pass(state)
                    self._validate(state.epoch, state, hooks, signals)
                    for on_save_point in hooks.on_save_point:
                        on_save_point(state)
        return state

    def _count(self, state: LoopState) -> None:
        state.max_epochs = self.max_epochs
        length, window = self._inputs.length, window_of(state.optim_wrapper)
        last, weighted = -1, is_weighted(state.optim_wrapper)
        if length is not None:
            epochs = max(0, self.max_epochs - state.epoch)
            last = state.iteration + max(0, epochs * length - state.batch)
            if window is not None and weighted:
                done = updates_done(state.batch, length, window)
                state.max_steps = state.step + max(0, epochs * -(-length // window) - done)
            elif window is not None:
                # The last window may have fewer batches.
                state.max_steps = state.step - (-last // window) - state.iteration // window
        elif window != 1 and not weighted:
            logger.warning(
                "the training loader has no length, so the end of the run is not known: gradients "
                "of a last accumulation window that is not full will be lost"
            )
        start_counting(state.optim_wrapper, state.model, state.iteration, last)


@LOOPS.register_module(name=["IterTrainLoop", "IterBasedTrainLoop"])
class IterTrainLoop(_TrainLoop):
    """Trains for a number of optimizer updates, passing over the data as often as needed.

    The whole run is one epoch of events; `state.epoch` counts the passes.

    Args:
        max_steps: Optimizer updates.
        val_begin: The first update after which `val_loop` may run.
        val_interval: Updates between two validations; there is always one after the last update.
        dynamic_intervals: (step, val_interval) pairs: from that update on, another interval.

    The others are as in `EpochTrainLoop`.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataloader: Iterable[Any],
        *,
        max_steps: int,
        val_loop: ValLoop | None = None,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
        log_every_steps: int = 50,
        sanity_val: bool = True,
        skip_steps: Sequence[int | str] = (),
        prefetch_to_device: bool = False,
        steps_per_call: int = 1,
    ) -> None:
        schedule = ValSchedule("steps", max_steps, val_begin, val_interval, dynamic_intervals)
        super().__init__(dataloader, schedule, val_loop, log_every_steps, sanity_val, skip_steps)
        self.prefetch_to_device = prefetch_to_device
        self.steps_per_call = positive("steps_per_call", steps_per_call)
        self.max_steps = self._last_step = schedule.last

    def run(self, state: LoopState, hooks: HookList) -> LoopState:
        """Train until `max_steps` or a stop, from where `state` is; every rank must call this."""
        self._ended = False
        while not self._ended:
            with self._session(state, hooks) as signals:
                for on_epoch_start in hooks.on_epoch_start:
                    on_epoch_start(state)
                state.model.train()
                if self.val_loop is not None:
                    self._catch_up(state.step, state, hooks, signals)
                while state.step < self.max_steps and not state.stop_reason:
                    self._pass(state, hooks, signals)
                    if state.step < self.max_steps and not state.stop_reason:
                        self._end_pass(state)
                        for on_save_point in hooks.on_save_point:
                            on_save_point(state)
                if not state.stop_reason:
                    for on_epoch_end in hooks.on_epoch_end:
                        on_epoch_end(state)
        return state

    def _count(self, state: LoopState) -> None:
        state.max_steps = self.max_steps
        length, window = self._inputs.length, window_of(state.optim_wrapper)
        last = -1
        if window is not None and is_weighted(state.optim_wrapper):
            if length is not None:
                done = updates_done(state.batch, length, window) + self.max_steps - state.step
                passes, begun = divmod(done, -(-length // window))
                last = state.iteration - state.batch + passes * length + begun * window
                state.max_epochs = state.epoch + passes + (begun > 0)
        elif window is not None:
            last = (state.iteration // window + self.max_steps - state.step) * window
            if length is not None:
                left = last - state.iteration
                state.max_epochs = state.epoch + -(-(state.batch + left) // length)
        start_counting(state.optim_wrapper, state.model, state.iteration, last)
