"""How a loss becomes new weights: backward, accumulation, clipping, the update."""

from __future__ import annotations

import logging
import operator
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
from ..sharding.layout import drop_held_gradients, is_dtensor, no_sync, parameters_of
from .clipping import GradClip
from .first_update import FirstUpdate
from .gates import ClosureGate, Gate, GuardGate, UpdateGuard, check_closure
from .loss_weight import LossWeight
from .optim_state import is_spread, kind_of, load_state, state_of
from .optimizer_fit import check_optimizer, needs_closure
from .windows import CountWindow, WeightedWindow

logger = logging.getLogger(__name__)

_COUNT_KEY = "stepwrap.inner_count"
_UNIT_KEY = "stepwrap.loss_unit"
_KIND_KEY = "stepwrap.optimizer"
_BASE_KEY = "base_param_settings"
# Entering this costs a tenth of a generator-based context, on every step.
_NOTHING = nullcontext()


class Accumulation(OptimFeatures):
    """Counts micro-batches, ``accumulative_counts`` per update; base of the optimizer wrappers.

    Attributes:
        max_counts: micro-batches at the end of the training; -1 if that is not known.
        resumed_at: micro-batches before the training began or was resumed.
        window: the micro-batches of an update, and their weights.
        gates: take part in each micro-batch and update; empty in the common case.
    """

    def __init__(self, accumulative_counts: int) -> None:
        # Integers of numpy have an index as well, and bools must not count.
        if isinstance(accumulative_counts, bool) or not hasattr(accumulative_counts, "__index__"):
            raise TypeError(f"accumulative_counts must be an int, got {accumulative_counts!r}")
        if accumulative_counts < 1:
            # As documented by the system that this is for.
            raise AssertionError(
                "_accumulative_counts at least greater than or equal to 1, "
                f"got {accumulative_counts!r}"
            )
        self._accumulative_counts = operator.index(accumulative_counts)
        self._inner_count = 0
        self.max_counts = -1
        self._remainder_counts = -1
        self.resumed_at = 0
        self._pass_start, self._pass_end = 0, -1
        self.window = CountWindow()
        self.gates: list[Gate] = []

    @property
    def accumulative_counts(self) -> int:
        """Micro-batches per update."""
        return self._accumulative_counts

    @property
    def inner_count(self) -> int:
        """Micro-batches so far."""
        return self._inner_count

    @inner_count.setter
    def inner_count(self, count: int) -> None:
        self._inner_count = count

    # mmengine's name, which code for its optimizer wrappers reads.
    _max_counts = property(lambda self: self.max_counts)

    @property
    def guard(self) -> UpdateGuard | None:
        """The object that allows or prevents each update."""
        return next((one.guard for one in self.gates if isinstance(one, GuardGate)), None)

    @guard.setter
    def guard(self, guard: UpdateGuard | None) -> None:
        others = [one for one in self.gates if not isinstance(one, GuardGate)]
        self.gates = others if guard is None else [*others, GuardGate(guard)]

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Tell where training starts and ends, in micro-batches.

        With ``max_counts`` known, a shorter last window still ends in an update, and its losses
        are averaged over its own length.
        """
        for gate in self.gates:
            gate.begin(model)
        every = self._accumulative_counts
        self._inner_count = self.resumed_at = init_counts
        self._pass_start, self._pass_end = 0, -1
        self.max_counts = max_counts
        self._remainder_counts = max_counts % every if max_counts > 0 else -1
        if init_counts % every and self.loss_weight is None:
            logger.warning(
                "Resumed iteration number is not divisible by accumulative_counts "
                "(%d and %d): the first update sees %d micro-batches only.",
                init_counts,
                every,
                self._length_at(init_counts),
            )
        has_norm = every > 1 and any(isinstance(part, _BatchNorm) for part in model.modules())
        if has_norm and get_rank() == 0:
            logger.warning(
                "Gradient accumulative may slightly decrease the performance of models with "
                "BatchNorm: its statistics come from single micro-batches."
            )

    def accumulate(self, counts: int) -> None:
        """Take that many micro-batches per update from here on, where a window begins."""
        self._accumulative_counts = counts
        self.window.accumulate(counts)

    def begin_pass(self, start: int, length: int | None) -> None:
        """Tell where a pass over the data begins and, where it is known, how long it is.

        With ``loss_weight`` a window begins with the pass, and a shorter last one ends with it;
        without, windows go on over its end, and this changes nothing. May be called again as soon
        as the length is known.

        Args:
            start: micro-batches before the pass, also where it is resumed inside.
            length: micro-batches in it.
        """
        if self.loss_weight is not None:
            self._pass_start = start
            self._pass_end = -1 if length is None else start + length

    def should_update(self) -> bool:
        """Whether the micro-batch just counted ends its window."""
        count = self._inner_count
        full = (count - self._pass_start) % self._accumulative_counts == 0
        return full or count in (self._pass_end, self.max_counts)

    def should_sync(self) -> bool:
        """Whether the coming micro-batch ends its window (asked before its backward)."""
        count = self._inner_count + 1
        full = (count - self._pass_start) % self._accumulative_counts == 0
        return full or count in (self._pass_end, self.max_counts)

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set what the coming micro-batch weighs; without ``loss_weight`` nothing happens.

        To be called with the preprocessed batch before the backward; the usual steps do.

        Args:
            model: the wrapper, which knows the ranks whose gradients are averaged; default: that
                of the last ``optim_context``.
        """
        if self.loss_weight is None:
            return
        if model is not None:
            self.window.enter(model)
        self.last_weight = self.window.weigh(batch if self.batch_counts else None)

    @property
    def window_weight(self) -> float:
        """Weight of the micro-batches whose gradients this rank holds; for checkpoints.

        Set it together with the gradients of a window: otherwise held gradients count as 0.
        """
        return float(self.window.total or 0.0)

    @window_weight.setter
    def window_weight(self, weight: float) -> None:
        if self.loss_weight is not None:
            self.window.total = weight

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide ``loss`` by the number of micro-batches in its window.

        With ``loss_weight``: multiply it by its weight; ``step`` divides by those of the window.
        """
        # The last gate, a guard, sees the loss as it came.
        for gate in reversed(self.gates):
            loss = gate.scale(loss)
        if self._accumulative_counts == 1:
            return loss
        length = self.window_length()
        return loss if length == 1 else loss / length

    @property
    def loss_scale(self) -> float | Tensor:
        """The factor of this window's gradients; other backwards than `backward` multiply by it."""
        return 1.0

    def window_length(self) -> int:
        """Return what the next loss is divided by: the length of its window, 1 if it is weighed."""
        return 1 if self.loss_weight is not None else self._length_at(self._inner_count)

    def _length_at(self, index: int) -> int:
        """Micro-batches whose gradients meet in the update that micro-batch ``index`` feeds."""
        every = self._accumulative_counts
        start = index - index % every
        end = start + every
        if 0 < self.max_counts <= index:
            return every
        if self.max_counts > 0:
            end = min(end, self.max_counts)
        # Gradients gathered before a restart are lost, so they must not be averaged over.
        return end - max(start, self.resumed_at)


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(Accumulation):
    """An optimizer with gradient accumulation and clipping.

    ``update_params(loss)`` scales the loss, runs backward and, at the end of a window, clips,
    steps and then clears the gradients. A subclass may override ``backward`` and ``step``,
    ``optim_context`` or ``update_params``. An optimizer that needs a closure, as LBFGS, is
    updated by ``update_by_closure``, from a training step of your own::

        class TwiceNoisy(OptimWrapper):
            def backward(self, loss, **kwargs):
                super().backward(loss, **kwargs)
                add_noise(self.optimizer)

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        accumulative_counts: micro-batches per update.
        clip_grad: ``{"max_norm": 1.0}``, or ``{"type": "value", "clip_value": 0.5}``;
            further keys are arguments of torch's clipping functions.
        loss_weight: what the losses are means over, over the window and over all ranks that
            average their gradients: "samples", "tokens", ``{"key": name}`` or a function, as for
            ``LossWeight``. Default: each micro-batch of each rank counts the same.

    Attributes:
        guard: asked before each update; if it says no the gradients are cleared, and nothing
            else happens. ``SpikeGuardHook`` sets it.
        loss_weight: the ``LossWeight``, None if every micro-batch counts the same.
        batch_counts: whether the next micro-batch is a real one. A loop sets it to False for
            one that only keeps other ranks company: it weighs 0.
        last_weight: weight of the last micro-batch of this rank.
        clip: clips the gradients; None if nothing is clipped.
        collective_state: whether every rank must call ``state_dict``.
        reads_parts: ``load_state_dict`` takes what can be cut in place of tensors.
        clip_grad_kwargs: ``clip_grad`` without its ``type``; None if nothing is clipped.
        grad_norm: total norm before clipping at the last update, a tensor on the device
            of the gradients; None while nothing was clipped by norm.

    Raises:
        AssertionError: ``accumulative_counts`` below 1, or ``clip_grad`` says nothing.
        TypeError: an argument of another type, or one in ``clip_grad`` that torch does not take.
        ValueError: the optimizer cannot step parameters spread over the ranks, or it needs a
            closure and there is accumulation, clipping or ``loss_weight``.
    """

    # How to clip may have a type, but is no part of its own.
    config_plain: tuple[str, ...] = ("clip_grad",)
    reads_parts = True
    collective_state = property(lambda self: is_spread(self.optimizer))
    defaults = property(
        lambda self: getattr(self.optimizer, "defaults", {}),
        doc="The optimizer's settings for groups that do not set them.",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        loss_weight: str | Mapping[str, Any] | Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(accumulative_counts)
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.needs_closure = needs_closure(type(optimizer))
        self._is_sharded = any(is_dtensor(one) for one in parameters_of(optimizer))
        self.grad_norm: Tensor | None = None
        self.clip = None if clip_grad is None else GradClip(clip_grad)
        self.clip_grad_kwargs = self.clip and self.clip.options
        self.loss_weight = self.last_weight = None
        self.batch_counts = True
        if loss_weight is not None:
            self.loss_weight = LossWeight(loss_weight)
            self.window = WeightedWindow(self.loss_weight, optimizer, accumulative_counts)
            self.gates.append(self.window)
        self._first = FirstUpdate(optimizer)
        self.gates.append(self._first)
        if self.needs_closure:
            check_closure(self)
            self.gates.append(ClosureGate())
        self.base_param_settings: dict[str, Any] | None = None
        if len(optimizer.param_groups) > 1:
            self.base_param_settings = {"params": torch.tensor([0.0]), **optimizer.defaults}

    def update_params(
        self,
        loss: Tensor,
        step_kwargs: Mapping[str, Any] | None = None,
        zero_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Backward, and at the end of a window step and clear the gradients."""
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def update_by_closure(self, closure: Callable[[], Tensor], model: Any) -> Tensor:
        """Update by a loss that the optimizer may ask for several times (LBFGS).

        Counts one micro-batch and returns the loss before the update, detached. Every rank must
        call this: the optimizer sees the mean of the ranks' losses, so that all decide alike.

        Args:
            closure: computes the loss of the batch, without backward; runs in ``optim_context``.
            model: the wrapper, which knows the ranks; anything else is a TypeError.

        Raises:
            ValueError: with accumulation, clipping, a loss scale or ranks of unequal lengths.
        """
        check_closure(self, model)
        if not hasattr(model, "average"):
            raise TypeError(
                "update_by_closure needs the model wrapper, which knows the ranks whose losses are "
                f"to be averaged, got {type(model).__name__}: give self, not self.module"
            )
        wrapper: Any = model
        self._inner_count += 1

        def evaluate() -> Any:
            self.zero_grad()
            with self.optim_context(wrapper):
                loss = closure()
            loss.backward()  # type: ignore[no-untyped-call]
            if self._first in self.gates:
                self._first.allows(self)
            return wrapper.average(loss.detach())

        first: Any = self.optimizer.step(evaluate)
        self.zero_grad()
        return torch.as_tensor(first).detach()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and count the micro-batch."""
        for gate in self.gates:
            gate.begin_backward(self.should_sync())
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip, if so configured, and update the parameters.

        Raises:
            RuntimeError: none of them has ever had a gradient, though `backward` has run; they
                are no longer the model's; or the first gradients differ between ranks.
            ValueError: the optimizer needs a closure.
        """
        # A copy: the check of the first update leaves the list.
        for gate in (*self.gates,):
            if not gate.allows(self):
                self.zero_grad()
                return
        if self.clip is not None:
            self.unscale()
            self.grad_norm = self.clip(self.optimizer)
        self.apply(**kwargs)

    def unscale(self) -> None:
        """Undo the scale of the losses in the gradients; called before they are clipped."""

    def apply(self, **kwargs: Any) -> None:
        """Update the parameters by the optimizer."""
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients, under fsdp also those that wait for the end of their window."""
        for gate in self.gates:
            gate.clear()
        optimizer = self.optimizer
        if self._is_sharded:
            drop_held_gradients(parameters_of(optimizer))
        if kwargs or getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad(**kwargs)
            return
        # What torch does by default, without its profiler entry: 5 us on a small step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """``model.no_sync()`` where the coming micro-batch does not end its window."""
        for gate in self.gates:
            gate.enter(model)
        if self._accumulative_counts == 1 or self.should_sync():
            return _NOTHING
        own: Any = getattr(model, "no_sync", None)
        return no_sync(model) if own is None else own()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; with several, a further one that carries the base settings."""
        groups = self.optimizer.param_groups
        return groups if self.base_param_settings is None else [*groups, self.base_param_settings]

    def get_lr(self) -> dict[str, list[float]]:
        """Learning rate of every group, and ``base_lr`` when there are several."""
        base = self.base_param_settings
        rates = {} if base is None else {"base_lr": [base["lr"]]}
        return {**rates, "lr": [group["lr"] for group in self.optimizer.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Momentum (Adam-like: the first beta; else 0) of every group."""
        groups = self.optimizer.param_groups
        found = (one.get("momentum", one.get("betas", (0.0,))[0]) for one in groups)
        return {"momentum": list(map(float, found))}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with its kind and our count of micro-batches beside it.

        State of sharded parameters appears as ``DTensor``s. Every rank must call this where
        `collective_state`; under ``ZeroRedundancyOptimizer`` the first rank alone gets the state
        of the parameters.
        """
        state = state_of(self.optimizer)
        if self.base_param_settings is not None:
            state[_BASE_KEY] = dict(self.base_param_settings)
        state[_KIND_KEY] = kind_of(self.optimizer)
        state[_COUNT_KEY] = self._inner_count
        if self.loss_weight is not None:
            state[_UNIT_KEY] = self.window.unit
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``, or the state of the bare optimizer.

        It may come from another kind of parallelism: a whole tensor, or anything with ``shape``
        and ``[slices]`` that returns tensors, may stand for this rank's part.

        Raises:
            ValueError: it is the state of another kind of optimizer, or of other parameters.
        """
        state = dict(state_dict)
        own = kind_of(self.optimizer)
        kind = state.pop(_KIND_KEY, own)
        if kind != own:
            # torch would take it and fail at the next step for want of a setting.
            raise ValueError(f"it is the state of {kind}, but the optimizer is {own}")
        base = state.pop(_BASE_KEY, None)
        if base is not None and self.base_param_settings is not None:
            self.base_param_settings = dict(base)
        if (count := state.pop(_COUNT_KEY, None)) is not None:
            self._inner_count = self.resumed_at = count
        self.window.unit = state.pop(_UNIT_KEY, 0.0)
        load_state(self.optimizer, state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.optimizer).__name__}, "
            f"accumulative_counts={self._accumulative_counts}, clip_grad={self.clip})"
        )
