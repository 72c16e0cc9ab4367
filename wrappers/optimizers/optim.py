"""The optimizer wrapper: backward, gradient accumulation, clipping and the update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...collectives import get_rank
from ...registry import OPTIM_WRAPPERS
from ..features import OptimFeatures
from ..layout import drop_unreduced_gradients, get_parameters, is_dtensor, no_sync, unreduced
from .clipping import GradClip
from .first_update import FirstUpdate, SameParameters
from .gates import (
    NO_GATE,
    ClosureGate,
    Gates,
    GradientGate,
    GuardGate,
    UpdateGuard,
    check_closure,
)
from .loss_weight import LossWeight
from .optim_state import (
    NAMES,
    get_kind,
    get_state,
    has_names,
    has_sharded_state,
    load_state,
    match_by_name,
)
from .optimizer_fit import check_optimizer, needs_closure
from .windows import CountWindow, ShortWindow, WeightedWindow, WindowChange, check_counts

logger = logging.getLogger(__name__)

_COUNT_KEY = "stepwrap.inner_count"
_WINDOWS_KEY = "stepwrap.windows"
_UNIT_KEY = "stepwrap.loss_unit"
_KIND_KEY = "stepwrap.optimizer"
_BASE_KEY = "base_param_settings"
_NO_CONTEXT = nullcontext()


class Accumulation(OptimFeatures):
    """Count micro-batches and group them into windows; base class of the optimizer wrappers.

    A *window* consists of the micro-batches of one update, usually ``accumulative_counts`` of them.

    Attributes:
        accumulative_counts: micro-batches per update.
        inner_count: number of micro-batches so far.
        max_counts: total number of micro-batches of the training; -1 if unknown.
        resumed_at: number of micro-batches before the training began or was resumed.
        ends_by_updates: whether the training ends after a number of updates, so that ``accumulate``
            changes ``max_counts``. The training loops set it.
        window: the weights of the micro-batches in the current window.
        gates: objects called in each micro-batch and update; usually none after the first update.
        loss_scale: the factor by which ``backward`` multiplies losses, for code that does not call
            it.
    """

    can_close_window = True
    loss_scale: Any = 1.0
    # False after the warning.
    warns_of_batch_norm = True
    accumulative_counts = property(lambda self: self._accumulative_counts)
    inner_count = property(lambda self: self._inner_count)
    foreign_parameters = property(lambda self: self.gates.phase.foreign)

    # mmengine's names; code that is written for its optimizer wrappers reads them.
    _max_counts = property(lambda self: self.max_counts)
    _remainder_counts = property(
        lambda self: self.max_counts % self._accumulative_counts if self.max_counts > 0 else -1
    )

    def __init__(self, accumulative_counts: int) -> None:
        self._accumulative_counts = check_counts(accumulative_counts)
        # Subclasses that override `backward` as in mmengine count here.
        self._inner_count = 0
        self.max_counts = -1
        self.resumed_at = 0
        self.ends_by_updates = False
        # Set here, because compiled steps compare which attributes there are.
        self.empty_updates = 0
        # The last micro-batch of the pass.
        self._pass_end = -1
        self._changed: WindowChange | None = None
        self.window = CountWindow()
        self.gates = Gates()

    @property
    def guard(self) -> UpdateGuard | None:
        """The object that decides before each update whether it happens."""
        gate = self.gates.guard
        return gate.guard if isinstance(gate, GuardGate) else None

    @guard.setter
    def guard(self, guard: UpdateGuard | None) -> None:
        self.gates.guard = NO_GATE if guard is None else GuardGate(guard)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the first and last micro-batch of the training.

        If ``max_counts`` is known, a shorter last window still ends with an update, and its losses
        are averaged over its length.
        """
        for gate in self.gates.active:
            gate.begin(model)
        changed, self._changed, self.counted_from = self._changed, None, 0
        if changed is not None and changed.continues_at(init_counts, self._inner_count):
            self.accumulate(changed.counts, since=changed.since)
            self._changed = changed
        every = self._accumulative_counts
        self._inner_count = self.resumed_at = init_counts
        self._pass_end, self.max_counts = -1, max_counts
        if (init_counts - self.counted_from) % every and self.loss_weight is None:
            logger.warning(
                "Resumed iteration number is not divisible by accumulative_counts "
                "(%d and %d): the first update uses only %d micro-batches.",
                init_counts,
                every,
                self.window_length(),
            )
        has_norm = every > 1 and any(isinstance(module, _BatchNorm) for module in model.modules())
        if has_norm and self.warns_of_batch_norm and get_rank() == 0:
            logger.warning(
                "BatchNorm computes its statistics from single micro-batches, also with "
                "accumulative_counts=%d: the model may become slightly worse than with batches of "
                "the full size",
                every,
            )
        # A loop calls this again when it rolls back.
        self.warns_of_batch_norm &= not has_norm

    def continue_window(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Like ``initialize_count_status``, but continue a window whose gradients were restored.

        Its remaining losses are scaled as without the interruption. If a checkpoint has restored
        ``inner_count``, it is used instead of ``init_counts``.
        """
        count = self._inner_count or init_counts
        self.initialize_count_status(model, self.window_start(count), max_counts)
        self._inner_count = count

    def count_micro_batch(self) -> None:
        """Count a micro-batch whose backward did not run by ``backward``."""
        self._inner_count += 1

    def skip_micro_batch(self) -> None:
        """Count a micro-batch that is left out, with the weight 0."""
        if self.loss_weight is not None:
            self.last_weight = 0.0
        self.count_micro_batch()

    def close_window(self, length: int) -> None:
        """Make the next micro-batch the last one of its window, because the data end with it.

        The gradients of the window become the mean of its micro-batches. Training loops call this
        before the last batch of a run whose end was not known in advance, without ``loss_weight``.

        Args:
            length: number of micro-batches in the window, including the next one.
        """
        self._pass_end = self._inner_count + 1
        self.gates.short_window = ShortWindow(self.window_length() / length)

    def accumulate(self, counts: int, *, since: int | None = None) -> None:
        """Change the number of micro-batches per update; call it between two windows.

        Checkpoints store the change, so that a resumed run continues with it.

        Args:
            counts: the new number.
            since: the micro-batch from which windows of this length are counted; default: the next
                one.

        Raises:
            AssertionError: ``counts`` is below 1.
            RuntimeError: a window has begun, so its losses are divided by the former number.
            TypeError: ``counts`` is not an integer.
        """
        counts, every, count = check_counts(counts), self._accumulative_counts, self._inner_count
        if since is None and counts != every:
            if not self.should_update() and count > self.resumed_at:
                raise RuntimeError(
                    f"accumulate({counts}) must be called between two windows, but "
                    f"{count - self.window_start(count)} of the {every} micro-batches of this one "
                    "have run: call it after an update, for example in on_update"
                )
            since = count
            self._changed = WindowChange(counts, since)
            if self.ends_by_updates and self.max_counts > count:
                updates = (self.max_counts - count) // every
                # The windows of a weighted pass also end with the pass.
                self.max_counts = -1 if self.loss_weight is not None else count + updates * counts
        self._accumulative_counts = counts
        self.counted_from = self.counted_from if since is None else since
        self.window.accumulate(counts)

    def begin_pass(self, start: int, length: int | None) -> None:
        """Set the start of a pass over the data and, if it is known, its length.

        With ``loss_weight``, windows begin and end with the pass, so the last one may be shorter.
        Without ``loss_weight``, windows continue in the next pass, and this call has no effect.
        Call it again when the length becomes known.

        Args:
            start: number of micro-batches before the pass. If training resumes inside the pass,
                this is still the beginning of the pass and not the point of resumption.
            length: number of micro-batches in the pass.
        """
        if self.loss_weight is not None:
            if not start <= self.counted_from <= self._inner_count:
                self.counted_from = start
            self._pass_end = -1 if length is None else start + length

    def should_update(self) -> bool:
        """Return whether the last micro-batch ended its window."""
        count = self._inner_count
        full = (count - self.counted_from) % self._accumulative_counts == 0
        return full or count in (self._pass_end, self.max_counts)

    def should_sync(self) -> bool:
        """Return whether the next micro-batch ends its window; call it before the backward."""
        count = self._inner_count + 1
        full = (count - self.counted_from) % self._accumulative_counts == 0
        return full or count in (self._pass_end, self.max_counts)

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set the weight of the next micro-batch; without ``loss_weight`` nothing happens.

        Call it before the backward in a custom training step. The default steps call it.

        Args:
            batch: the preprocessed batch.
            model: the wrapper whose ranks average their gradients; default: the wrapper of the last
                ``optim_context``.
        """
        if self.loss_weight is None:
            return
        if model is not None:
            self.window.enter(model)
        self.last_weight = self.window.weigh(batch if self.batch_counts else None)

    @property
    def window_weight(self) -> float:
        """Total weight of the micro-batches whose gradients this rank holds, for checkpoints.

        Set it when you restore the gradients of an unfinished window; otherwise their weight is 0.
        """
        return float(self.window.total or 0.0)

    @window_weight.setter
    def window_weight(self, weight: float) -> None:
        if self.loss_weight is not None:
            self.window.total = weight

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide ``loss`` by the number of micro-batches in its window.

        With ``loss_weight``, multiply it by the micro-batch's weight instead; ``step`` then divides
        the gradients by the window's total weight.
        """
        for gate in reversed(self.gates.active):
            loss = gate.scale(loss)
        if self._accumulative_counts == 1:
            return loss
        length = self.window_length()
        return loss if length == 1 else loss / length

    def window_length(self) -> int:
        """Return the divisor of the next loss: the length of its window, 1 with ``loss_weight``."""
        if self.loss_weight is not None:
            return 1
        index, every = self._inner_count, self._accumulative_counts
        start = index - (index - self.counted_from) % every
        end = start + every
        if 0 < self.max_counts <= index:
            return every
        if self.max_counts > 0:
            end = min(end, self.max_counts)
        # A restart loses the gradients of earlier micro-batches, so they do not count.
        return end - max(start, self.resumed_at)


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(Accumulation):
    """An optimizer with gradient accumulation and clipping.

    ``update_params(loss)`` scales the loss, runs backward and, at the end of a window, clips the
    gradients, updates the parameters and clears the gradients. If the optimizer needs a closure,
    like LBFGS, call ``update_by_closure`` in a custom training step. A subclass may override
    ``backward``, ``step``, ``optim_context`` or ``update_params``::

        class TwiceNoisy(OptimWrapper):
            def backward(self, loss, **kwargs):
                super().backward(loss, **kwargs)
                add_noise(self.optimizer)

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        accumulative_counts: micro-batches per update.
        clip_grad: ``{"max_norm": 1.0}``, or ``{"type": "value", "clip_value": 0.5}``;
            further keys are arguments of torch's clipping functions.
        loss_weight: the weight of a batch's loss in the mean over the window and over all ranks
            that average their gradients: "samples", "tokens", ``{"key": name}`` or a function, as
            for ``LossWeight``. Default: all micro-batches of all ranks count the same.

    Attributes:
        guard: decides before each update whether it happens; if it does not, the gradients are
            cleared. ``SpikeGuardHook`` sets it.
        loss_weight: the ``LossWeight``; None if every micro-batch counts the same.
        batch_counts: whether the next micro-batch is real. A loop sets it to False for a batch of
            weight 0, which a rank without data runs because other ranks wait for its communication.
        last_weight: weight of the last micro-batch of this rank.
        clip: the object that clips the gradients; None without clipping.
        collective_state: whether every rank must call ``state_dict``.
        reads_parts: whether ``load_state_dict`` also accepts objects that have a ``shape`` and can
            be sliced, instead of whole tensors. It then reads only this rank's part of them.
        clip_grad_kwargs: ``clip_grad`` without its ``type``; None without clipping.
        empty_updates: number of updates since the last log record that were skipped because no
            parameter had a gradient. They are counted in a group of optimizers, with float16 and
            with clipping by value; in other cases torch's optimizers change nothing.
        grad_norm: total norm before clipping at the last update, a tensor on the device
            of the gradients; None before the first clipping by norm.

    Raises:
        AssertionError: ``accumulative_counts`` is below 1, or ``clip_grad`` is not a mapping or
            lacks "max_norm" or "clip_value".
        TypeError: another argument has the wrong type, or ``clip_grad`` contains an argument that
            torch's clipping function does not take.
        ValueError: the optimizer cannot update sharded parameters, or it needs a closure and there
            is accumulation, clipping or ``loss_weight``.
    """

    # The registry passes ``clip_grad`` as it is, although it may have a ``type``.
    config_plain: tuple[str, ...] = ("clip_grad",)
    reads_parts = True
    collective_state = property(lambda self: has_sharded_state(self.optimizer))
    defaults = property(
        lambda self: getattr(self.optimizer, "defaults", {}),
        doc="The optimizer's default settings of parameter groups.",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        loss_weight: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(accumulative_counts)
        if not hasattr(optimizer, "param_groups") or hasattr(optimizer, "update_params"):
            name = getattr(optimizer, "__name__", type(optimizer).__name__)
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {name}")
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.needs_closure = needs_closure(type(optimizer))
        self._is_sharded = any(is_dtensor(param) for param in get_parameters(optimizer))
        self.grad_norm: Tensor | None = None
        self.clip = None if clip_grad is None else GradClip(clip_grad)
        self.clip_grad_kwargs = self.clip and self.clip.options
        self.loss_weight = self.last_weight = None
        self.batch_counts = True
        if loss_weight is not None:
            self.loss_weight = LossWeight(loss_weight)
            self.window = WeightedWindow(self.loss_weight, optimizer, accumulative_counts)
            self.gates.window = self.window
        self.gates.first_update = FirstUpdate(optimizer)
        if self._is_sharded:
            self.gates.same_parameters = SameParameters(optimizer)
        if self.needs_closure:
            check_closure(self)
            self.gates.closure = ClosureGate()
        if self.clip is not None and self.clip.kind == "value":
            self.gates.gradients = GradientGate()
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            self.base_param_settings = {"params": torch.tensor([0.0]), **optimizer.defaults}

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Mapping[str, Any] | None = None,
        zero_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run backward; at the end of a window, update the parameters and clear the gradients.

        Every rank must call this.
        """
        self.backward(self.scale_loss(loss))
        # Without accumulation, each micro-batch ends its window.
        if self._accumulative_counts == 1 or self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def update_by_closure(self, closure: Callable[[], Tensor], model: Any) -> Tensor:
        """Update with an optimizer that computes the loss several times, such as LBFGS.

        Counts one micro-batch and returns the detached loss before the update. Every rank must
        call this. The optimizer gets the mean of the ranks' losses, so all ranks make the same
        update.

        Args:
            closure: returns the loss of the batch and does not run backward. It is called in
                ``optim_context``.
            model: the model wrapper.

        Raises:
            TypeError: ``model`` is not a model wrapper.
            ValueError: there is accumulation, ``loss_weight``, clipping, a loss scale (float16) or
                ``uneven_inputs``.
        """
        check_closure(self, model)
        if not callable(getattr(type(model), "average", None)):
            raise TypeError(
                "update_by_closure needs the model wrapper, which averages the loss over the "
                f"ranks, got {type(model).__name__}: give self, not self.module"
            )
        wrapper: Any = model
        self._inner_count += 1

        def evaluate() -> Any:
            self.zero_grad()
            with self.optim_context(wrapper):
                loss = closure()
            loss.backward()  # type: ignore[no-untyped-call]
            self.gates.first_update.allows(self)
            return wrapper.average(loss.detach())

        initial_loss: Any = self.optimizer.step(evaluate)
        self.zero_grad()
        return torch.as_tensor(initial_loss).detach()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and count the micro-batch."""
        for gate in self.gates.active:
            gate.begin_backward(self.should_sync())
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        for gate in self.gates.active:
            gate.end_backward()
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients, if configured, and update the parameters; every rank must call this.

        Raises:
            RuntimeError: at the first update gradients differ between ranks, or no parameter has a
                gradient, for example because wrapping replaced the model's parameters.
            ValueError: the optimizer needs a closure.
        """
        if unreduced:
            unreduced.reduce(get_parameters(self.optimizer))
        for gate in self.gates.active:
            if not gate.allows(self):
                self.zero_grad()
                return
        if self.clip is not None:
            self.unscale()
            self.grad_norm = self.clip(self.optimizer)
        self.apply(**kwargs)

    def unscale(self) -> None:
        """Undo the loss scale in the gradients; called before clipping."""

    def apply(self, **kwargs: Any) -> None:
        """Update the parameters by the optimizer."""
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients, including those that fsdp keeps unsharded until the window ends."""
        for gate in self.gates.active:
            gate.clear()
        optimizer = self.optimizer
        if self._is_sharded:
            drop_unreduced_gradients(get_parameters(optimizer))
        if kwargs or getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad(**kwargs)
            return
        # The same as torch's default, without its profiler entry: saves 5 us per step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return ``model.no_sync()``; an empty context if the next micro-batch ends its window."""
        for gate in self.gates.active:
            gate.enter(model)
        if self._accumulative_counts == 1 or self.should_sync():
            return _NO_CONTEXT
        no_sync_method: Any = getattr(model, "no_sync", None)
        return no_sync(model) if no_sync_method is None else no_sync_method()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups and, if there are several, one more group with the base settings.

        This last group contains no parameter of the model.
        """
        groups = self.optimizer.param_groups
        return groups if self.base_param_settings is None else [*groups, self.base_param_settings]

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rate of every group, and ``base_lr`` if there are several groups."""
        base = self.base_param_settings
        rates = {} if base is None else {"base_lr": [base["lr"]]}
        return {**rates, "lr": [group["lr"] for group in self.optimizer.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum of every group: the first beta for Adam, 0 if there is none."""
        groups = self.optimizer.param_groups
        momenta = (group.get("momentum", group.get("betas", (0.0,))[0]) for group in groups)
        return {"momentum": list(map(float, momenta))}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with its class and the count of micro-batches.

        The state of sharded parameters consists of ``DTensor``s. Every rank must call this if
        ``collective_state``. With ``ZeroRedundancyOptimizer`` only the first rank gets the state of
        the parameters.
        """
        state = get_state(self.optimizer)
        if self.base_param_settings is not None:
            state[_BASE_KEY] = dict(self.base_param_settings)
        state[_KIND_KEY] = get_kind(self.optimizer)
        state[_COUNT_KEY] = self._inner_count
        if self._changed is not None:
            state[_WINDOWS_KEY] = [self._accumulative_counts, self.counted_from]
        if self.loss_weight is not None:
            state[_UNIT_KEY] = self.window.unit
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, or the state of the optimizer without a wrapper.

        The state may come from another kind of parallelism. Each tensor in it is a ``DTensor``, a
        whole tensor, or an object with a ``shape`` whose slices are tensors. If the state contains
        ``DTensor``s, every rank must call this.

        If the saved optimizer and this one were created with ``named_parameters()``, parameters are
        paired by name, and the saved groups are used. Otherwise they are paired by position, as in
        torch. Checkpoints of stepwrap's loops always store names.

        Raises:
            ValueError: the state belongs to another kind of optimizer, or to other parameters.
        """
        state = dict(state_dict)
        own_kind = get_kind(self.optimizer)
        kind = state.pop(_KIND_KEY, own_kind)
        if kind != own_kind:
            # torch would load it, and fail in the next step because a setting is missing.
            raise ValueError(f"the optimizer is {own_kind}, but the state to load is of {kind}")
        base = state.pop(_BASE_KEY, None)
        if (count := state.pop(_COUNT_KEY, None)) is not None:
            self._inner_count = self.resumed_at = count
        self._changed = None
        if (windows := state.pop(_WINDOWS_KEY, None)) is not None:
            self._changed = WindowChange(*windows)
            self.accumulate(self._changed.counts, since=self._changed.since)
        self.window.unit = state.pop(_UNIT_KEY, 0.0)
        groups = self.optimizer.param_groups
        if has_names(groups) and has_names(state["param_groups"]):
            names = {
                id(p): [n]
                for g in groups
                for p, n in zip(g["params"], g.get(NAMES, ()), strict=True)
            }
            matched = match_by_name(self.optimizer, state, names)
            state = matched.content
            if matched.stateless or matched.unused:
                logger.warning(
                    "the state to load has no parameters %s, and the optimizer has none of %s",
                    *(matched.stateless or "-", matched.unused or "-"),
                )
        load_state(self.optimizer, state)
        if len(self.optimizer.param_groups) == 1:
            self.base_param_settings = None
        elif base is not None:
            self.base_param_settings = dict(base)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.optimizer).__name__}, "
            f"accumulative_counts={self._accumulative_counts}, clip_grad={self.clip})"
        )
