"""Gates: objects in ``OptimWrapper.gates`` that can change losses and prevent updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ...collectives import get_rank
from ..features import model_features, optim_features
from ..layout import get_parameters, is_dtensor, local_part
from ..steps.step_checks import has_custom_step

logger = logging.getLogger(__name__)


class Gate:
    """Base class of objects that an optimizer wrapper calls in each micro-batch and update.

    By default its methods change nothing and allow every update.
    """

    @property
    def foreign(self) -> Collection[Tensor]:
        """Parameters whose gradients are dropped when the next window begins."""
        return ()

    def begin(self, model: Any) -> None:
        """Handle the start of the training of ``model``."""

    def enter(self, model: Any) -> None:
        """Handle the start of a forward of ``model``."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on; every rank must call this."""
        return loss

    def begin_backward(self, ends_window: bool) -> None:
        """Handle the start of a backward; ``ends_window`` is True in the last one of a window."""

    def end_backward(self) -> None:
        """Handle the end of a backward."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Return whether to apply the current (unclipped, scaled) gradients."""
        return True

    def clear(self) -> None:
        """Handle the clearing of the gradients."""


# The content of an empty slot.
NO_GATE = Gate()


class Gates:
    """The gates of an optimizer wrapper, each in its slot.

    Before an update the gates are called in the order of the slots below, whichever was set first;
    losses go through them in reverse. Set a slot to ``NO_GATE`` to remove its gate; a gate may do
    this itself while it is called. A step without gates calls none.

    Attributes:
        short_window: corrects the gradients of a short window. It is first, because all others
            must get the gradients of the update.
        phase: keeps the gradients of several optimizers apart. It acts on forwards and backwards
            and not on updates, so that any place would do.
        window: divides the gradients by the weight of the window. If that is 0, they may be NaN,
            and it sets them to zero before other gates read them.
        first_update: checks the gradients of the first update. It precedes gates that skip
            updates without gradients or drop gradients, because it reports missing gradients.
        same_parameters: compares which sharded parameters have gradients. It precedes gates that
            drop gradients or skip updates, which every rank does alike.
        closure: refuses updates by an optimizer that needs a closure. It precedes gates that
            prepare an update, because there is none.
        gradients: skips and counts updates without gradients. It precedes ``freeze``, because
            gradients that are dropped on purpose do not count as missing.
        added: gates that a user appended.
        freeze: drops the gradients of frozen parameters. It precedes ``guard``, which must not
            judge gradients that are not applied.
        guard: decides whether to update. It is last, and thus the first in reverse order, to get
            the gradients that will be applied and the losses that the model returned.
        active: the gates that are set, in this order.
    """

    short_window: Gate = NO_GATE
    phase: Gate = NO_GATE
    window: Gate = NO_GATE
    first_update: Gate = NO_GATE
    same_parameters: Gate = NO_GATE
    closure: Gate = NO_GATE
    gradients: Gate = NO_GATE
    added: tuple[Gate, ...] = ()
    freeze: Gate = NO_GATE
    guard: Gate = NO_GATE
    active: tuple[Gate, ...] = ()

    def __setattr__(self, slot: str, content: Any) -> None:
        """Set a slot and ``active``.

        Raises:
            AttributeError: ``slot`` is not the name of a slot.
        """
        if slot not in type(self).__annotations__:
            raise AttributeError(f"gates have no slot {slot!r}")
        super().__setattr__(slot, content)
        in_order = (
            self.short_window,
            self.phase,
            self.window,
            self.first_update,
            self.same_parameters,
            self.closure,
            self.gradients,
            *self.added,
            self.freeze,
            self.guard,
        )
        # A new tuple, so that a gate can leave its slot during a loop over the old one. Compared by
        # type, because a copy of the gates has a copy of NO_GATE.
        active = tuple(gate for gate in in_order if type(gate) is not Gate)
        super().__setattr__("active", active)

    def append(self, gate: Gate) -> None:
        """Add a user's gate."""
        self.added = (*self.added, gate)


class FreezeGate(Gate):
    """Freeze parameters for a number of updates by dropping their gradients before each update.

    Optimizers skip parameters without a gradient: neither weight decay nor momentum changes them,
    and their state is created in the first update that trains them. Backward still computes their
    gradients, because wrappers such as ddp expect the same parameters in every step.

    Attributes:
        steps: function that returns the number of updates so far.
        frozen: ``{n: parameters}``; the first ``n`` updates do not change these parameters.
    """

    def __init__(self, steps: Callable[[], int], frozen: Mapping[int, Sequence[Tensor]]) -> None:
        self.steps = steps
        self.frozen = frozen

    def allows(self, optim_wrapper: Any) -> bool:
        """Drop the gradients of frozen parameters; return whether any gradient is left."""
        done = self.steps()
        dropped = False
        for until, parameters in self.frozen.items():
            for parameter in parameters if done < until else ():
                parameter.grad, dropped = None, True
        if not dropped:
            optim_wrapper.gates.freeze = NO_GATE
            return True
        return any(param.grad is not None for param in get_parameters(optim_wrapper.optimizer))


class GradientGate(Gate):
    """Skip and count updates for which no parameter has a gradient.

    Torch's loss scaler and its clipping by value fail in such an update.
    """

    def allows(self, optim_wrapper: Any) -> bool:
        """Return whether any parameter has a gradient."""
        if any(p.grad is not None for p in get_parameters(optim_wrapper.optimizer)):
            return True
        optim_wrapper.count_empty_update()
        return False


class PhaseGate(Gate):
    """Keep the gradients of several optimizers apart.

    A backward of one optimizer also reaches the parameters of others that are not frozen: the
    generator's backward leaves gradients in the discriminator. A member drops them when its own
    window begins; if that has begun already, it gets its own gradients back. A member that never
    runs a backward keeps them, because it shares the loss of another member.

    Args:
        name: the name of the member.
        optim_wrapper: the member.
        gates: the gates of all members; this one is added to them.
    """

    def __init__(self, name: str, optim_wrapper: Any, gates: list[PhaseGate]) -> None:
        self.name = name
        self._optim_wrapper = optim_wrapper
        self._gates = gates
        self._names: dict[int, str] = {}
        self._runs_backward = False
        # The gradients of this member, during a backward of another one.
        self._held: dict[Tensor, Tensor] = {}
        self._sharded: dict[Tensor, Any] = {}
        self._unreached: set[Tensor] = set()
        # By parameter: a gradient that only other members' backwards have made, and its version.
        self._foreign: dict[Tensor, tuple[Tensor, int]] = {}
        self._logged: set[str] = set()
        gates.append(self)

    @property
    def foreign(self) -> Collection[Tensor]:
        """Parameters whose gradients this member drops when its next window begins."""
        return self._foreign if self._runs_backward else ()

    def enter(self, model: Any) -> None:
        """Drop the gradients of other members before a forward of this one."""
        if not self._names:
            self._names = {id(p): name for name, p in model.named_parameters()}
        if self._runs_backward and self._foreign:
            self._drop()

    def begin_backward(self, ends_window: bool) -> None:
        """Drop the gradients of other members, and take theirs away until ``end_backward``."""
        self._runs_backward = True
        if self._foreign:
            self._drop()
        mine = set(get_parameters(self._optim_wrapper.optimizer))
        for gate in self._gates:
            if gate is not self:
                gate.hold(mine)

    def end_backward(self) -> None:
        """Give the other members their gradients back."""
        mine = set(get_parameters(self._optim_wrapper.optimizer))
        for gate in self._gates:
            if gate is not self:
                gate.release(mine, self.name)

    def clear(self) -> None:
        """Forget gradients that were cleared."""
        self._foreign = {}

    def hold(self, shared: Set[Tensor]) -> None:
        """Take away the gradients of this member, except in ``shared`` parameters."""
        # FSDP keeps gradients of an unfinished window elsewhere, and adds all of them at once.
        in_window = not self._optim_wrapper.should_update()
        for parameter in get_parameters(self._optim_wrapper.optimizer):
            if parameter in shared:
                continue
            if in_window and is_dtensor(parameter):
                # In a backward that cannot reach a frozen parameter, FSDP may still reduce what it
                # keeps of the window, which changes the gradient without adding to it.
                if parameter.requires_grad:
                    self._sharded[parameter] = _version(parameter)
                else:
                    self._unreached.add(parameter)
            elif (gradient := parameter.grad) is not None and parameter not in self._foreign:
                # A copy, because DDP may use the memory of the gradient in the other backward.
                self._held[parameter] = gradient.clone()
                parameter.grad = None

    def release(self, shared: Set[Tensor], maker: str) -> None:
        """Restore the gradients of this member after a backward of the member ``maker``.

        Raises:
            RuntimeError: FSDP has added them to gradients of an unfinished window.
        """
        reached: list[Tensor] = []
        expected = shared | self._unreached
        for parameter in get_parameters(self._optim_wrapper.optimizer):
            gradient = parameter.grad
            if parameter in self._held:
                parameter.grad = self._held[parameter]
                reached += [parameter] if gradient is not None else []
            elif parameter in self._sharded:
                if self._sharded[parameter] != _version(parameter):
                    raise RuntimeError(self._explanation(maker, [parameter], "cannot be dropped"))
            elif gradient is not None and parameter not in expected:
                self._foreign[parameter] = gradient, gradient._version
        self._held, self._sharded, self._unreached = {}, {}, set()
        reached = reached or list(self.foreign)
        if reached and maker not in self._logged and get_rank() == 0:
            self._logged.add(maker)
            logger.warning("%s", self._explanation(maker, reached, "are dropped"))

    def _drop(self) -> None:
        for parameter, (gradient, version) in self._foreign.items():
            # Another backward, such as one of a penalty, may have added to it since.
            if parameter.grad is gradient and gradient._version == version:
                parameter.grad = None
        self._foreign = {}

    def _explanation(self, maker: str, reached: Sequence[Tensor], effect: str) -> str:
        names = [self._names[id(p)] for p in reached if id(p) in self._names]
        named = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return (
            f"the backward of {maker!r} also reaches parameters of {self.name!r}{named}. These "
            f"gradients {effect}; an optimizer must not update with gradients of another one's "
            "backward. Freeze the parameters meanwhile by requires_grad_(False), which is faster; "
            "or, to train both with one loss, call step() of both after one backward"
        )


def _version(parameter: Tensor) -> tuple[int, int] | None:
    """Return a value that changes when the gradient of a ``DTensor`` does."""
    if parameter.grad is None:
        return None
    gradient = local_part(parameter.grad)
    return gradient.data_ptr(), gradient._version


class UpdateGuard(Protocol):
    """An object that decides before each update whether it happens."""

    def note(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch before its backward."""

    def allows(self, optim_wrapper: Any) -> bool:
        """Return whether to apply the current (unclipped, scaled) gradients."""


class GuardGate(Gate):
    """Call an ``UpdateGuard`` as a gate."""

    def __init__(self, guard: UpdateGuard) -> None:
        self.guard = guard

    def scale(self, loss: Tensor) -> Tensor:
        self.guard.note(loss.detach())
        return loss

    def allows(self, optim_wrapper: Any) -> bool:
        return self.guard.allows(optim_wrapper)


class ClosureGate(Gate):
    """Raise ValueError when an optimizer that needs a closure is updated without one."""

    def allows(self, optim_wrapper: Any) -> bool:
        raise ValueError(_closure_advice(optim_wrapper.optimizer))


def _closure_advice(optimizer: Optimizer) -> str:
    return (
        f"{type(optimizer).__name__} needs a closure that computes the loss again, several times "
        "in a step: override the wrapper's train_step and call "
        "optim_wrapper.update_by_closure(closure, self) there, or use an optimizer that steps from "
        "gradients, such as AdamW"
    )


def refuse_without_closure(optim_wrapper: Any, model: Any) -> None:
    """Raise ValueError if the optimizer needs a closure and ``model`` has the default step."""
    if optim_features(optim_wrapper).needs_closure and not has_custom_step(model):
        raise ValueError(_closure_advice(optim_wrapper.optimizer))


def check_closure(optim_wrapper: Any, model: Any = None) -> None:
    """Raise ValueError if ``optim_wrapper`` cannot update by a closure."""
    every, clip = optim_wrapper.accumulative_counts, optim_wrapper.clip
    problem = ""
    if every != 1:
        problem = (
            f"needs accumulative_counts=1, got {every}: it computes the loss several times, always "
            "on the same data; use larger batches"
        )
    elif optim_wrapper.loss_weight is not None:
        problem = (
            f"needs loss_weight=None, got {optim_wrapper.loss_weight}: compute the "
            "weighted mean in the closure"
        )
    elif clip is not None:
        problem = f"needs clip_grad=None, got {clip}: its line search needs unclipped gradients"
    elif optim_wrapper.scales_losses:
        problem = "needs losses without a loss scale, got float16: use dtype bfloat16 or float32"
    elif model_features(model).uneven_inputs is not None:
        problem = "needs the same number of batches on all ranks: remove uneven_inputs"
    if problem:
        name = type(optim_wrapper.optimizer).__name__
        raise ValueError(f"{name} with a closure {problem}")
