"""How a loss becomes new weights: accumulation, clipping, the step, a closure."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from ...collectives import get_rank
from ...registry import OPTIM_WRAPPERS
from ..features import OptimFeatures, optim_features
from ..sharding.layout import (
    drop_held_gradients,
    has_placed,
    is_dtensor,
    local_part,
    no_sync,
    parameters_of,
    total_norm,
)
from ..steps.step_checks import FirstUpdate, has_own_step
from ..torch_functions import check_options, option_names
from .loss_weight import LossWeight, WeightedWindow
from .optim_state import is_spread, kind_of, load_state, state_of
from .optimizer_fit import check_optimizer, needs_closure

logger = logging.getLogger(__name__)

_COUNT_KEY = "stepwrap.inner_count"
_UNIT_KEY = "stepwrap.loss_unit"
_KIND_KEY = "stepwrap.optimizer"
_BASE_KEY = "base_param_settings"
# Entering this costs a tenth of a generator-based context, on every step.
_NOTHING = nullcontext()


class UpdateGuard(Protocol):
    """Decides before each update whether it is made."""

    def note(self, loss: Tensor) -> None:
        """Hear of the loss of a micro-batch, before its backward."""

    def allows(self, optim_wrapper: OptimWrapper) -> bool:
        """Whether to update by the gradients as they are now, not clipped and not unscaled."""


class Accumulation(OptimFeatures):
    """Counts micro-batches, ``accumulative_counts`` per update; base of the optimizer wrappers.

    Attributes:
        loss_weight: what the losses are means over; None where a micro-batch counts as one.
        batch_counts: whether the coming micro-batch is a real one. A loop sets it to False for
            one that only keeps other ranks company: it weighs 0.
        last_weight: of the last micro-batch that was weighed on this rank.
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
        self._max_counts = -1
        self._remainder_counts = -1
        self._resumed_at = 0
        self._first: FirstUpdate | None = None
        self._pass_start, self._pass_end = 0, -1
        self.loss_weight: LossWeight | None = None
        # Set together with loss_weight.
        self._window: WeightedWindow | None = None
        self.batch_counts = True
        self.last_weight: float | Tensor | None = None
        self.guard: UpdateGuard | None = None

    @property
    def accumulative_counts(self) -> int:
        """Micro-batches per update."""
        return self._accumulative_counts

    @property
    def inner_count(self) -> int:
        """Micro-batches so far."""
        return self._inner_count

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Tell where training starts and ends, in micro-batches.

        With ``max_counts`` known, a shorter last window still ends in an update, and its losses
        are averaged over its own length.
        """
        if self._first is not None:
            self._first.note(model)
        every = self._accumulative_counts
        self._inner_count = self._resumed_at = init_counts
        self._pass_start, self._pass_end = 0, -1
        self._max_counts = max_counts
        self._remainder_counts = max_counts % every if max_counts > 0 else -1
        if init_counts % every and self.loss_weight is None:
            logger.warning(
                "Resumed iteration number is not divisible by accumulative_counts "
                "(%d and %d): the first update sees %d micro-batches only.",
                init_counts,
                every,
                self._window_length(init_counts),
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
        if self._window is not None:
            self._window.accumulate(counts)

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
        return full or count in (self._pass_end, self._max_counts)

    def should_sync(self) -> bool:
        """Whether the coming micro-batch ends its window (asked before its backward)."""
        count = self._inner_count + 1
        full = (count - self._pass_start) % self._accumulative_counts == 0
        return full or count in (self._pass_end, self._max_counts)

    def weigh(self, batch: Any, model: Any = None) -> None:
        """Set what the coming micro-batch weighs; without ``loss_weight`` nothing happens.

        To be called with the preprocessed batch before the backward; the usual steps do.

        Args:
            model: the wrapper, which knows the ranks whose gradients are averaged; default: that
                of the last ``optim_context``.
        """
        window = self._window
        if window is None:
            return
        if model is not None and window.model() is not model:
            window.note(model)
        weight = window.measure(batch) if self.batch_counts else 0.0
        self.last_weight = window.weight = weight

    @property
    def window_weight(self) -> float:
        """What the micro-batches weigh whose gradients this rank holds; for checkpoints.

        To be set where the gradients of a window are set: those that are held count as 0 else.
        """
        total = None if self._window is None else self._window.total
        return 0.0 if total is None else float(total)

    @window_weight.setter
    def window_weight(self, weight: float) -> None:
        if self._window is not None:
            self._window.total = weight

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Divide ``loss`` by the number of micro-batches in its window.

        With ``loss_weight``: multiply it by its weight; ``step`` divides by those of the window.
        """
        if self.guard is not None:
            self.guard.note(loss.detach())
        window = self._window
        if window is not None:
            return loss if window.is_whole else window.scaled(loss)
        if self._accumulative_counts == 1:
            return loss
        length = self._window_length(self._inner_count)
        return loss if length == 1 else loss / length

    @property
    def loss_scale(self) -> float | Tensor:
        """The factor of this window's gradients; other backwards than `backward` multiply by it."""
        return 1.0

    def _check_first(self) -> None:
        """Refuse a first update by what are no gradients of the model, or not those of all."""
        if self._first is not None and self._first.check(self._inner_count > self._resumed_at):
            self._first = None

    def _window_length(self, index: int) -> int:
        """Micro-batches whose gradients meet in the update that micro-batch ``index`` feeds."""
        every = self._accumulative_counts
        start = index - index % every
        end = start + every
        if 0 < self._max_counts <= index:
            return every
        if self._max_counts > 0:
            end = min(end, self._max_counts)
        # Gradients gathered before a restart are lost, so they must not be averaged over.
        return end - max(start, self._resumed_at)


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
        guard: asked before each update; where it says no the gradients are cleared, and nothing
            else happens. ``SpikeGuardHook`` sets it.
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
        self._first = FirstUpdate(optimizer)
        self.grad_norm: Tensor | None = None
        self._clip = None if clip_grad is None else GradClip(clip_grad)
        self.clip_grad_kwargs = self._clip and self._clip.options
        if loss_weight is not None:
            self.loss_weight = LossWeight(loss_weight)
            self._window = WeightedWindow(self.loss_weight, optimizer, accumulative_counts)
        if self.needs_closure:
            _check_closure(self)
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
        _check_closure(self, model)
        average: Callable[[Tensor], Tensor] | None = getattr(model, "average", None)
        if average is None:
            raise TypeError(
                "update_by_closure needs the model wrapper, which knows the ranks whose losses are "
                f"to be averaged, got {type(model).__name__}: give self, not self.module"
            )
        self._inner_count += 1

        def evaluate() -> Tensor:
            self.zero_grad()
            with self.optim_context(model):
                loss = closure()
            loss.backward()  # type: ignore[no-untyped-call]
            self._check_first()
            return average(loss.detach())

        first: Any = self.optimizer.step(evaluate)  # type: ignore[arg-type]
        self.zero_grad()
        return torch.as_tensor(first).detach()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward and count the micro-batch."""
        window = self._window
        if window is not None:
            window.take()
            if window.ranks > 1 and self.should_sync():
                window.send()
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip, if so configured, and update the parameters.

        Raises:
            RuntimeError: none of them has ever had a gradient, though `backward` has run; they
                are no longer the model's; or the first gradients differ between ranks.
            ValueError: the optimizer needs a closure.
        """
        if self._window is not None:
            self._window.average()
        if self._first is not None:
            self._check_first()
        if self.needs_closure:
            raise ValueError(closure_advice(self.optimizer))
        if self.guard is not None and not self.guard.allows(self):
            self.zero_grad()
            return
        if self._clip is not None:
            self.grad_norm = self._clip(self.optimizer)
        self.optimizer.step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients, under fsdp also those that wait for the end of their window."""
        if self._window is not None:
            self._window.total = None
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
        if self._first is not None:
            self._first.note(model)
        window = self._window
        if window is not None and window.model() is not model:
            window.note(model)
        if self._accumulative_counts == 1 or self.should_sync():
            return _NOTHING
        own: Any = getattr(model, "no_sync", None)
        return no_sync(model) if own is None else own()

    @property
    def collective_state(self) -> bool:
        """Whether the state is spread over the ranks, so that all must call ``state_dict``."""
        return is_spread(self.optimizer)

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's settings for groups that have none of their own."""
        return getattr(self.optimizer, "defaults", {})

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
        if self._window is not None:
            state[_UNIT_KEY] = self._window.unit
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
            self._inner_count = self._resumed_at = count
        unit = state.pop(_UNIT_KEY, 0.0)
        if self._window is not None:
            self._window.unit = unit
        load_state(self.optimizer, state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.optimizer).__name__}, "
            f"accumulative_counts={self._accumulative_counts}, clip_grad={self._clip})"
        )


def closure_advice(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} needs a closure that computes the loss again, several times "
        "in a step: override the wrapper's train_step and call "
        "optim_wrapper.update_by_closure(closure, self) there, or use an optimizer that steps from "
        "gradients, such as AdamW"
    )


def refuse_without_closure(optim_wrapper: Any, model: Any) -> None:
    """Raise ValueError if the optimizer needs a closure and no step of `model` can give one."""
    if optim_features(optim_wrapper).needs_closure and not has_own_step(model):
        raise ValueError(closure_advice(optim_wrapper.optimizer))


def _check_closure(optim_wrapper: Any, model: Any = None) -> None:
    """Raise ValueError where ``optim_wrapper`` cannot update by a closure."""
    name = type(optim_wrapper.optimizer).__name__
    every = optim_wrapper._accumulative_counts
    if every != 1:
        raise ValueError(
            f"{name} with a closure needs accumulative_counts=1, got {every}: each of its losses "
            "must be that of the same data; use larger batches"
        )
    if optim_wrapper.loss_weight is not None:
        raise ValueError(
            f"{name} with a closure needs loss_weight=None: each of its losses must be the mean "
            "that it compares; compute that in the closure"
        )
    if optim_wrapper._clip is not None:
        raise ValueError(
            f"{name} with a closure needs clip_grad=None, got {optim_wrapper._clip}: it compares "
            "losses with gradients, which clipped are of another loss"
        )
    scaler = getattr(optim_wrapper, "loss_scaler", None)
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            f"{name} with a closure takes no scaled loss: use dtype bfloat16 or float32"
        )
    if getattr(model, "uneven_inputs", None) is not None:
        raise ValueError(
            f"{name} with a closure needs as many batches on all ranks: leave uneven_inputs out"
        )


_CLIPS: dict[str, Any] = {"norm": clip_grad_norm_, "value": clip_grad_value_}


class GradClip:
    """Clips the gradients of an optimizer by torch's function for "norm" or "value"."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if not isinstance(settings, Mapping) or not settings:
            raise AssertionError(
                "If `clip_grad` is not None, it should be a `dict` which is the arguments of "
                "`torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.clip_grad_value_`, "
                f"got {settings!r}"
            )
        self.options = options = dict(settings)
        self.kind = kind = options.pop("type", "value" if "clip_value" in options else "norm")
        if kind not in _CLIPS:
            raise ValueError(f'type of clip_grad should be "norm" or "value" but got {kind!r}')
        allowed = option_names(_CLIPS[kind])[1:]
        if not options:
            raise AssertionError(
                "`clip_grad` should contain other arguments besides `type`: "
                f"for {kind!r} at least {allowed[0]!r}"
            )
        check_options(f"clip_grad of type {kind!r}", options, allowed)

    def __repr__(self) -> str:
        return f"GradClip(kind={self.kind!r}, options={self.options})"

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Clip in place; returns the total norm before (None for "value").

        Where parameters are sharded every rank must call this.
        """
        parameters: Any = [
            parameter
            for parameter in parameters_of(optimizer)
            if parameter.requires_grad and parameter.grad is not None
        ]
        clip: Callable[..., Tensor | None] = _CLIPS[self.kind]
        if not has_placed(optimizer):
            return clip(parameters, **self.options)
        # torch's functions fail on parameters of different meshes; they only look at `grad`.
        parts = [SimpleNamespace(grad=local_part(one.grad)) for one in parameters]
        if self.kind == "norm":
            return _clip_parts_by_norm(parameters, parts, **self.options)
        return clip(parts, **self.options)


@torch.no_grad()
def _clip_parts_by_norm(
    parameters: Any,
    parts: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    total = total_norm([one.grad for one in parameters], float(norm_type), like=parameters)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it "
            "cannot be clipped; error_if_nonfinite=False goes on nevertheless"
        )
    clip_grads_with_norm_(parts, max_norm, total, foreach)
    return total
