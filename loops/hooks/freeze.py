"""Train some parameters only after a number of updates."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor
from torch.optim import SGD

from ...collectives import get_rank
from ...registry import HOOKS
from ...wrappers.blocks import find_parameters
from ...wrappers.optimizers.gates import FreezeGate
from ..checkpoints.weights import user_model
from ..hook import Hook
from ..schedule import members_of
from ..state import LoopState

logger = logging.getLogger(__name__)


@HOOKS.register_module()
class FreezeHook(Hook):
    """Keep parameters unchanged for the first updates; weight decay and momentum skip them too.

    The result is the same as with ``requires_grad=False`` during these updates, and a resumed run
    continues exactly. Unlike parameters that stay frozen, these need a backward pass and memory for
    gradients from the start. Their gradients are left out of clipping and of the update.

    Args:
        until_step: maps the name of a parameter, the path of a module, or an fnmatch pattern of
            either to the number of updates that leave these parameters unchanged. If several
            entries match a parameter, the largest number counts.

    Raises:
        ValueError: a number is below 1. When training starts: a name matches no parameter, or the
            optimizer needs a closure.
        TypeError: when training starts: the optimizer wrapper is not one of ours.
    """

    # Called before hooks that look at the optimizer wrapper.
    order = 10

    def __init__(self, *, until_step: Mapping[str, int]) -> None:
        for name, step in until_step.items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise ValueError(f"FreezeHook: until_step of {name!r} must be at least 1: {step!r}")
        self._until = dict(until_step)

    def on_train_start(self, state: LoopState) -> None:
        # Found by name only now, because wrappers replace parameters.
        model = user_model(state.model)
        until: dict[Tensor, int] = {}
        for name, step in self._until.items():
            for parameter in find_parameters(model, name, "freeze").values():
                until[parameter] = max(step, until.get(parameter, 0))
        frozen: dict[int, list[Tensor]] = {}
        for kept, step in until.items():
            frozen.setdefault(step, []).append(kept)
        for member in members_of(state.optim_wrapper):
            if not hasattr(member, "gates"):
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
            others = [one for one in member.gates if not isinstance(one, FreezeGate)]
            # The freeze gate comes last: it drops gradients that the first-update gate must check.
            member.gates = [*others, FreezeGate(lambda: state.step, frozen)]

    def on_update(self, state: LoopState) -> None:
        names = [name for name, step in self._until.items() if step == state.step]
        if names and get_rank() == 0:
            logger.info("step %d: unfreezing %s", state.step, ", ".join(names))
