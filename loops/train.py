"""The training loops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from time import monotonic
from typing import Any

from ..registry import LOOPS
from ..wrappers.features import require_optim_wrapper
from .data.layout import split_into_updates
from .data.loaders import get_length
from .data.resume import batches_of_pass, make_resumable
from .data.shares import Share
from .error_notes import naming_missing_ranks, note_failure
from .evaluation import Evaluation, adapt_loop, require_step
from .hook import HookList, Scalars
from .logs import merged_means
from .metrics.directions import find_directions
from .schedule import (
    Budget,
    Cadence,
    EpochBudget,
    StepBudget,
    has_gradients,
    is_weighted,
    pop_empty_updates,
    positive,
    start_counting,
)
from .signals import StopSignals
from .skipping.rollback import Rollback
from .skipping.skip_steps import parse_skip_steps, skip_listed_steps
from .state import LoopState, Phase
from .steps import get_step
from .uneven_inputs import PassInputs, divide_among_ranks

# The buffer of raw log values is reduced after this many updates, to bound its memory.
_FOLD_STEPS = 256

# The methods of an optimizer wrapper that a loop calls; steps and checkpoints may need more.
_NEEDED = ("update_params", "should_update", "initialize_count_status")

_EMPTY = (
    "the training loader must have at least one batch, got none: use more samples, a smaller "
    "batch_size or drop_last=False"
)


@dataclass(eq=False, repr=False)
class _TrainLoop:
    """Train until the budget is used up, starting from the counters of the state.

    A run consists of one session, and of another one after each rollback to a checkpoint.
    """

    dataloader: Iterable[Any]
    _: KW_ONLY
    val_loop: Evaluation | None = None
    val_begin: int | None = None
    val_interval: int
    val_every_secs: float | None = None
    dynamic_intervals: Sequence[tuple[int, int]] | None = None
    log_every_steps: int = 50
    sanity_val: bool = True
    skip_steps: Sequence[int | str] = ()
    prefetch_to_device: bool = False
    per_rank: bool = False

    def __post_init__(self) -> None:
        self.budget = self._make_budget()
        if get_length(self.dataloader) == 0:
            raise ValueError(_EMPTY)
        self.dataloader = make_resumable(self.dataloader)
        self.val_loop = adapt_loop(self.val_loop, Phase.VAL)
        if self.val_every_secs is not None and not self.val_every_secs > 0:
            raise ValueError(f"val_every_secs must be > 0 or null, got {self.val_every_secs!r}")
        self._val_clock = Cadence(every_secs=self.val_every_secs)
        positive("log_every_steps", self.log_every_steps)
        self._skip_steps = parse_skip_steps(self.skip_steps)
        self._share = Share(self.per_rank)
        self._by_epoch = isinstance(self.budget, EpochBudget)
        # The last update of the run; None if epochs are counted.
        self._last_step = None if self._by_epoch else self.budget.last

    @abstractmethod
    def _make_budget(self) -> Budget:
        """Return the length of the run."""

    @abstractmethod
    def run(self, state: LoopState, hooks: HookList) -> LoopState:
        """Train from the position in ``state`` to the end or a stop; every rank must call this."""

    @contextmanager
    def _begin(self, state: LoopState, hooks: HookList) -> Iterator[None]:
        self._check(state)
        hooks.begin_training(state)
        # Around all sessions, so that a signal during a rollback stops the next session.
        with StopSignals() as self._signals:
            yield

    @contextmanager
    def _session(self, state: LoopState, hooks: HookList) -> Iterator[None]:
        """Prepare and announce a session; announce its end, or the error that ended it."""
        self._prepare(state)
        self._signals.start(state.clock_s)
        try:
            with naming_missing_ranks(state):
                hooks.emit("on_train_start", state)
                yield
                if not state.signal:
                    self._signals.poll_now(state)
                self._record_rest(state, hooks)
                hooks.emit("on_train_end", state)
        except BaseException as error:
            note_failure(error, state, self.dataloader, "train_step")
            hooks.emit_exception(state, error)
            raise

    def _restore(self, rollback: Rollback, state: LoopState, hooks: HookList) -> None:
        try:
            rollback.restore(state)
        except BaseException as error:
            hooks.emit_exception(state, error)
            raise

    def _prepare(self, state: LoopState) -> None:
        """Divide the data among the ranks, plan the run, and reset what belongs to a session."""
        self.dataloader = divide_among_ranks(self._share, self.dataloader, state)
        split_into_updates(state, self.dataloader)
        self._inputs = inputs = PassInputs(state, self.dataloader, self.budget, self._share)
        if self.sanity_val and isinstance(self.val_loop, Evaluation):
            self.val_loop.try_batch(state)
        last = self.budget.plan(state, inputs.length, is_exact=inputs.has_exact_length)
        start_counting(
            state.optim_wrapper, state.model, state.iteration, last, by_updates=not self._by_epoch
        )
        state.dataloader = self.dataloader
        state.start_session(self._skip_steps, in_window=has_gradients(state.model))
        # At first the step at which the session started, then the step of its final log record.
        self._closed_at = state.step

    def _pass(self, state: LoopState, hooks: HookList) -> None:
        optim, log = state.optim_wrapper, state.logs.append
        batches: Iterable[Any] = batches_of_pass(self.dataloader, state, self.prefetch_to_device)
        batches, train_step = skip_listed_steps(batches, get_step(state), state)
        state.in_step = True
        for batch in self._inputs.synchronized(batches, state):
            for on_batch_start in hooks.on_batch_start:
                on_batch_start(state, batch)
            logs = train_step(batch, optim)
            log((state.step + 1, logs))
            for on_batch_end in hooks.on_batch_end:
                on_batch_end(state, batch, logs)
            state.iteration += 1
            state.batch += 1
            if not optim.should_update():
                continue
            state.step += 1
            state.updated_at = (state.epoch, state.batch, state.iteration)
            state.in_step = False
            for on_update in hooks.on_update:
                on_update(state)
            if state.together:
                self._after_update(state, hooks)
            if state.stop_reason or state.step == self._last_step:
                return
            state.in_step = True
        state.in_step = False
        if not state.batch:
            raise ValueError(_EMPTY)

    def _after_update(self, state: LoopState, hooks: HookList) -> None:
        """Log, poll for signals and validate after an update; every rank must call this."""
        if state.step % self.log_every_steps == 0:
            state.recorded_at = state.step
            self._record(state, hooks)
            state.logs.clear()
        elif state.step % _FOLD_STEPS == 0:
            state.logs.fold()
        if monotonic() >= self._signals.due_s:
            self._signals.poll(state)
        if not self._by_epoch or state.clock_s >= self._val_clock.due_at_s:
            self._validate(state, hooks)
        for on_save_point in hooks.on_save_point:
            on_save_point(state)

    def _record(self, state: LoopState, hooks: HookList) -> None:
        """Emit a log record with the means since the last one; every rank must call this."""
        sums = state.logs.sums()
        means = {name: total / count for name, (total, count) in sums.items()}
        scalars: Scalars = {**means, **pop_empty_updates(state.optim_wrapper)}
        hooks.emit("collect_logs", state, scalars)
        if not is_weighted(state.optim_wrapper):
            # A hook may have replaced a value.
            sums = {name: sums[name] for name in sums if scalars.get(name) is means[name]}
        hooks.emit("on_log", state, merged_means(scalars, sums))

    def _record_rest(self, state: LoopState, hooks: HookList) -> None:
        """Emit the final log record, at the end of training or before its last validation.

        Whether it is due depends only on counters, so all ranks agree. The log buffer is not
        cleared: if a resumed run trains further, its next record covers the whole interval.
        """
        if state.step not in (state.recorded_at, self._closed_at):
            self._closed_at = state.step
            self._record(state, hooks)

    def _end_pass(self, state: LoopState, hooks: HookList) -> None:
        state.epoch += 1
        state.batch = 0
        if state.updated_at is not None and state.updated_at[2] == state.iteration:
            state.updated_at = (state.epoch, 0, state.iteration)
        if self._by_epoch:
            self._validate(state, hooks)
        hooks.emit("on_save_point", state)

    def _validate(self, state: LoopState, hooks: HookList) -> bool:
        """Validate if a validation is due, and return whether it was."""
        is_due = self.budget.val_due(state)
        if state.clock_s >= self._val_clock.due_at_s and self._val_clock.due_step(state):
            is_due = not state.stop_reason
        if self.val_loop is None or not is_due:
            return False
        if self.budget.done(state) == self.budget.last:
            self._record_rest(state, hooks)
        self.val_loop.evaluate(state, hooks, self._signals.poll)
        return True

    def _validate_if_pending(self, state: LoopState, hooks: HookList) -> None:
        """Run the validation before training, or one that an earlier run did not complete."""
        if state.evaluated_at != state.step and self._validate(state, hooks):
            hooks.emit("on_save_point", state)

    def _check(self, state: LoopState) -> None:
        if state.optim_wrapper is None:
            raise ValueError("training needs an optimizer wrapper, but state.optim_wrapper is None")
        require_optim_wrapper(state.optim_wrapper)
        missing = [name for name in _NEEDED if not hasattr(state.optim_wrapper, name)]
        if missing:
            raise TypeError(
                f"state.optim_wrapper must be an optimizer wrapper, got a "
                f"{type(state.optim_wrapper).__name__} without {', '.join(missing)}; wrap the "
                "optimizer, as in OptimWrapper(optimizer)"
            )
        require_step(state.model, "train_step")
        state.higher_is_better = find_directions(getattr(self.val_loop, "metrics", {}))


@LOOPS.register_module(name=["EpochTrainLoop", "EpochBasedTrainLoop"])
@dataclass(eq=False, repr=False, kw_only=True)
class EpochTrainLoop(_TrainLoop):
    """A training loop that runs for a number of epochs and validates between them.

    Args:
        dataloader: this rank's batches. Every rank must have the same number of them, unless the
            model wrapper has ``uneven_inputs`` or the optimizer wrapper a ``loss_weight``. If the
            number is unknown or an estimate (iterable data sets, your own loaders), the ranks check
            before each batch that all of them have one. If all ranks would read the same batches,
            they are divided; see ``per_rank``. docs/checkpoints.md explains how a resumed run finds
            its position in a loader.
        max_epochs: passes over the data.
        val_loop: the validation loop, or several as ``EvalSets``; None for no validation.
        val_begin: the first epoch after which to validate, whatever the interval; 0 validates
            before training. Default: the first multiple of the interval.
        val_interval: validate after each epoch that is a multiple of this number, and after the
            last epoch, unless ``val_begin`` is greater.
        val_every_secs: seconds of training between two validations by the clock, in addition to
            the others. They may be inside an epoch. All ranks validate after the same update.
        dynamic_intervals: ascending (epoch, val_interval) pairs; each applies from its epoch on.
        log_every_steps: updates between two log records.
        sanity_val: run one validation batch before training, to find mistakes early; see
            ``ValLoop.try_batch``.
        skip_steps: numbers of steps, counted from 1 as in the log records, or ranges such as
            "1200-1210". These steps are counted but make no update; see docs/hooks.md.
        prefetch_to_device: copy each batch to the model's CUDA device or XPU on a separate stream,
            and read one batch ahead when that cannot affect a resumed run; see docs/configs.md.
        per_rank: whether ``dataloader`` gives each rank its own data. If false, the ranks compare
            their first batches, and divide them if they are the same; see docs/data.md.

    Raises:
        ValueError: the loader is empty, or an argument is not allowed.
        AssertionError: ``max_epochs`` is not a whole number.
    """

    max_epochs: int
    val_interval: int = 1

    def _make_budget(self) -> Budget:
        return EpochBudget(
            self.max_epochs, self.val_begin, self.val_interval, self.dynamic_intervals
        )

    def run(self, state: LoopState, hooks: HookList) -> LoopState:
        """Train from the position in ``state`` to the end or a stop; every rank must call this."""
        with self._begin(state, hooks):
            while True:
                try:
                    with self._session(state, hooks):
                        self._validate_if_pending(state, hooks)
                        while self.budget.continues(state):
                            state.model.train()
                            hooks.emit("on_epoch_start", state)
                            with self._inputs.joined(state):
                                self._pass(state, hooks)
                            if state.stop_reason:
                                break
                            hooks.emit("on_epoch_end", state)
                            self._end_pass(state, hooks)
                    return state
                except Rollback as rollback:
                    self._restore(rollback, state, hooks)


@LOOPS.register_module(name=["IterTrainLoop", "IterBasedTrainLoop"])
@dataclass(eq=False, repr=False, kw_only=True)
class IterTrainLoop(_TrainLoop):
    """A training loop that runs for a number of optimizer updates, in as many passes as needed.

    ``state.epoch`` counts the passes, but ``on_epoch_start`` and ``on_epoch_end`` are called only
    at the start and the end of training.

    Args:
        max_steps: optimizer updates.
        val_begin: the first update after which to validate, whatever the interval; 0 validates
            before training. Default: the first multiple of the interval.
        val_interval: validate after each update that is a multiple of this number, and after the
            last update, unless ``val_begin`` is greater.
        dynamic_intervals: ascending (step, val_interval) pairs; each applies from its step on.

    The other arguments are the same as in ``EpochTrainLoop``.
    """

    max_steps: int
    val_interval: int = 1000

    def _make_budget(self) -> Budget:
        return StepBudget(self.max_steps, self.val_begin, self.val_interval, self.dynamic_intervals)

    def run(self, state: LoopState, hooks: HookList) -> LoopState:
        """Train from the position in ``state`` to the end or a stop; every rank must call this."""
        with self._begin(state, hooks):
            while True:
                try:
                    with self._session(state, hooks):
                        state.model.train()
                        hooks.emit("on_epoch_start", state)
                        self._validate_if_pending(state, hooks)
                        while self.budget.continues(state):
                            self._pass(state, hooks)
                            if self.budget.continues(state):
                                self._end_pass(state, hooks)
                        if not state.stop_reason:
                            hooks.emit("on_epoch_end", state)
                    return state
                except Rollback as rollback:
                    self._restore(rollback, state, hooks)
