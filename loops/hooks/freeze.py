"""Train some parameters only after a number of updates, or keep modules in evaluation mode."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import SGD

from ...collectives import get_rank
from ...registry import HOOKS
from ...wrappers.blocks import find_modules, find_parameters
from ...wrappers.features import model_features
from ...wrappers.optimizers.gates import FreezeGate
from ...wrappers.optimizers.optim import OptimWrapper
from ...wrappers.steps.step_checks import log_frozen_norms
from ...wrappers.unwrap import user_model
from ..hook import Hook
from ..schedule import get_members
from ..state import LoopState

logger = logging.getLogger(__name__)


@HOOKS.register_module()
class FreezeHook(Hook):
    """Keep parameters unchanged for the first updates, or modules in evaluation mode.

    Weight decay and momentum skip unchanged parameters too. The result is the same as with
    ``requires_grad=False`` during these updates, and a resumed run continues exactly. Unlike
    parameters that stay frozen, these need a backward pass and memory for gradients from the start.
    Their gradients are left out of clipping and of the update.

    Args:
        until_step: maps the name of a parameter, the path of a module, or an fnmatch pattern of
            either to the number of updates that leave these parameters unchanged. If several
            entries match a parameter, the largest number counts.
        in_eval: paths of modules, or patterns, that stay in evaluation mode during training: their
            running statistics do not change, and they drop nothing. A name that is also in
            ``until_step`` stays in this mode for the same number of updates.

    Raises:
        ValueError: a number is below 1. When training starts: a name matches nothing, or the
            optimizer needs a closure.
        TypeError: when training starts: the model wrapper or optimizer wrapper is not one of ours.
    """

    # Called before hooks that look at the optimizer wrapper.
    order = 10

    def __init__(
        self, *, until_step: Mapping[str, int] | None = None, in_eval: Iterable[str] = ()
    ) -> None:
        until_step = until_step or {}
        for name, step in until_step.items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise ValueError(f"FreezeHook: until_step of {name!r} must be at least 1: {step!r}")
        self._until = dict(until_step)
        self._in_eval = [in_eval] if isinstance(in_eval, str) else list(in_eval)

    def on_train_start(self, state: LoopState) -> None:
        if self._in_eval:
            self._set_modes(state)
        if self._until:
            self._freeze(state)

    def _set_modes(self, state: LoopState) -> None:
        after = state.step + 1
        names = [name for name in self._in_eval if self._until.get(name, after) >= after]
        modules = find_modules(user_model(state.model), names, "freeze")
        model_features(state.model).keep_in_eval([*modules.values()])

    def _freeze(self, state: LoopState) -> None:
        # Found by name only now, because wrappers replace parameters.
        model = user_model(state.model)
        until: dict[nn.Parameter, int] = {}
        for name, step in self._until.items():
            for parameter in find_parameters(model, name, "freeze").values():
                until[parameter] = max(step, until.get(parameter, 0))
        frozen: dict[int, list[nn.Parameter]] = {}
        for kept, step in until.items():
            frozen.setdefault(step, []).append(kept)
        for member in get_members(state.optim_wrapper):
            if not isinstance(member, OptimWrapper):
                raise TypeError(
                    "freezing until a step needs an OptimWrapper of stepwrap, got a "
                    f"{type(member).__name__}"
                )
            if member.needs_closure:
                raise ValueError(
                    f"{type(member.optimizer).__name__} computes gradients in a closure, so they "
                    "cannot be dropped: freeze the parameters for the whole run, or use an "
                    "optimizer that steps from gradients, such as AdamW"
                )
            if isinstance(member.optimizer, SGD):
                for group in member.optimizer.param_groups:
                    # The fused SGD of torch fails if only some parameters have momentum.
                    group["fused"] = None
            member.gates.freeze = FreezeGate(lambda: state.step, frozen)
        if later := [parameter for parameter, step in until.items() if step > state.step]:
            log_frozen_norms(model, later)

    def on_update(self, state: LoopState) -> None:
        names = [name for name, step in self._until.items() if step == state.step]
        if not names:
            return
        if any(name in self._in_eval for name in names):
            self._set_modes(state)
        if get_rank() == 0:
            logger.info("step %d: unfreezing %s", state.step, ", ".join(names))
