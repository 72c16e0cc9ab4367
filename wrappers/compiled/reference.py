"""Eager steps on copies of model and optimizer, to compare programs with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .capture import step_losses
from .trace import GradientPlan, StepTensors, join_gradients, split_joined

# Tensors by kind ("weights", "buffers", "logs", a kind of optimizer state, ...) and name.
Values = Mapping[str, Mapping[str, Tensor]]

# Allowed difference from an eager step, relative to the change that the step makes.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# A program may differ from the exact step by this many times the difference of eager steps.
_FACTOR = 4.0
# Number of eager steps with weights changed by one rounding error, to measure its effect.
_NUDGES = 3


class EagerStep:
    """An eager step on copies of the model and the optimizer.

    Args:
        origin: the model and optimizer to copy.
        batch: a preprocessed batch.
        dtype: data type of the copies and the batch; default: unchanged.
        nudge: a seed, to change the weights by one rounding error; 0 for no change.
    """

    def __init__(
        self,
        origin: tuple[nn.Module, Optimizer],
        batch: Any,
        dtype: torch.dtype | None = None,
        nudge: int = 0,
    ) -> None:
        self.model, self.optimizer = copied(*origin)
        self._batch = batch
        if dtype is not None:
            self.model.to(dtype)
            self._batch = tree_map(lambda one: _cast(one, dtype), batch)
            for state in self.optimizer.state.values():
                state.update({name: _cast(one, dtype) for name, one in state.items()})
        if nudge:
            _nudge(self.model, nudge)
        self.places = StepTensors(self.model, self.optimizer)

    def backward(self, plan: GradientPlan, loss_factor: float | Tensor) -> dict[str, Tensor]:
        """Run forward and backward; return the logs."""
        total, logs = step_losses(self.model, self._batch)
        (total / plan.divisor * loss_factor).backward()  # type: ignore[no-untyped-call]
        return {name: one.detach() for name, one in logs.items() if isinstance(one, Tensor)}

    def parts(self, plan: GradientPlan) -> list[Tensor]:
        """Return the joined gradients, scaled so that their sum over the ranks is the mean."""
        wanted = self.places.trained_tensors()
        return [one / plan.ranks for one in join_gradients(wanted, [one.grad for one in wanted])]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the copied parameters, by name."""
        parameters = zip(self.places.names, self.places.parameters, strict=False)
        return {name: one.grad for name, one in parameters if one.grad is not None}


def update(
    places: StepTensors,
    clip: Callable[[Any], Tensor | None] | None,
    factor: float | Tensor,
    parts: Sequence[Tensor] = (),
) -> Tensor | None:
    """Clip the gradients and update eagerly; return the norm of the gradients.

    Args:
        factor: the factor of the gradients; 0 makes them zero, even if they are NaN.
        parts: the joined gradients after their reduction; default: ``grad`` of the parameters.
    """
    wanted = places.trained_tensors()
    given = split_joined(wanted, parts) if parts else [one.grad for one in wanted]
    for one, gradient in zip(wanted, given, strict=True):
        if gradient is not None:
            own = gradient.to(one.dtype, copy=True)
            one.grad = torch.zeros_like(own) if factor == 0 else own.mul_(factor)
    norm = None if clip is None else clip(places.optimizer)
    places.optimizer.step()
    return norm


def copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of both, including the gradients, which deepcopy does not copy."""
    copies = copy.deepcopy((model, optimizer))
    for one, other in zip(model.parameters(), copies[0].parameters(), strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    return copies


def clone_batch(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, batch)


def changed_values(places: StepTensors) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that an update changes: weights, buffers and the optimizer's state."""
    names, count = places.names, places.count
    kinds = {
        "weights": dict(zip(names[:count], places.parameters, strict=True)),
        "buffers": dict(zip(names[count:], places.buffers, strict=True)),
    }
    for at, name, state in places.states():
        kinds.setdefault(name, {})[f"{names[at]}: {name}"] = state[name]
    return kinds


def largest_difference(
    made: Values,
    start: Values,
    eager: Callable[..., Values],
    autocast_eps: float,
    slack: float = 1.0,
) -> str | None:
    """Return the name of the tensor that differs most from an eager step; None if all agree.

    First the program is compared with an eager step. Kinds of values that differ by more than
    rounding errors are then compared with an exact step: an eager step in double precision. Several
    eager steps (the usual step, and ``_NUDGES`` steps whose weights are changed by one rounding
    error) show how far rounding alone can lead away from the exact step. The program may be
    ``_FACTOR`` times as far from the exact step as the farthest eager step, plus the tolerances of
    ``_is_close``.

    Args:
        made: the values that the program has computed.
        start: the same tensors before the step, if they existed.
        eager: runs an eager step on copies; takes ``dtype`` and ``nudge`` of ``EagerStep``.
        autocast_eps: the rounding error of autocast's dtype; 0 without autocast.
        slack: the factor of the allowed difference.
    """
    # All steps use the recorded random numbers, because double precision would draw others.
    drawn = Draws()
    with drawn:
        usual = eager()
    is_close = partial(_is_close, made, start=start, autocast_eps=autocast_eps, slack=slack)
    wrong = [kind for kind in usual if not is_close(usual, kind=kind)]
    if not wrong:
        return None
    try:
        with Draws(drawn.tensors):
            exact = eager(dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, StopIteration):
        # The forward does not support double precision, or draws other random numbers there.
        exact = usual
    others = [usual]
    for seed in range(1, _NUDGES + 1):
        with Draws(drawn.tensors):
            others.append(eager(nudge=seed))
    for kind in wrong:
        spread = max(_distance(other, exact, kind) for other in others)
        if not is_close(exact, kind=kind, allowed=_FACTOR * spread):
            return max(exact[kind], key=lambda name: _relative(made, exact, start, kind, name))
    return None


def _is_close(
    made: Values,
    wanted: Values,
    *,
    start: Values,
    kind: str,
    autocast_eps: float,
    slack: float,
    allowed: float = 0.0,
) -> bool:
    if list(made.get(kind, {})) != list(wanted[kind]):
        return False
    tolerance = epsilon = 0.0
    for name, one in wanted[kind].items():
        new = made[kind][name]
        if not one.is_floating_point():
            if not torch.equal(one, new):
                return False
        elif not torch.equal(one.isfinite(), new.isfinite()):
            return False
        else:
            tolerance = max(tolerance, _TOLERANCE.get(new.dtype, 1e-3))
            epsilon = max(epsilon, torch.finfo(new.dtype).eps)
    size = _distance(wanted, {}, kind)
    change = _distance(wanted, start, kind)
    # Half precision rounds so much that only large differences can be detected.
    limit = allowed + max(tolerance, 4 * autocast_eps) * change + 2 * epsilon * size
    return _distance(made, wanted, kind) <= slack * limit + torch.finfo(torch.float32).tiny


def _distance(some: Values, others: Values, kind: str) -> float:
    own, other = some[kind], others.get(kind, {})
    return math.sqrt(sum(_difference(one, other.get(name)) ** 2 for name, one in own.items()))


def _difference(one: Tensor, other: Tensor | None) -> float:
    if not one.is_floating_point():
        return 0.0
    finite = one.isfinite()
    difference = one.detach().double()[finite]
    if other is not None:
        difference = difference - other.detach().double()[finite]
    return float(difference.norm())


def _relative(made: Values, exact: Values, start: Values, kind: str, name: str) -> float:
    one, new = exact[kind][name], made[kind].get(name)
    if new is None or not torch.equal(one.isfinite(), new.isfinite()):
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, new) else math.inf
    change = _difference(one, start.get(kind, {}).get(name))
    return _difference(new, one) / max(change, 1e-300)


def _cast(one: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(one, Tensor) and one.is_floating_point()
    return one.to(dtype) if is_number else one


def _nudge(model: nn.Module, seed: int) -> None:
    """Change each weight by at most one rounding error."""
    with torch.no_grad():
        for one in model.parameters():
            # Computed without random numbers, which ``Draws`` would record as part of the step.
            sign = (torch.arange(one.numel(), device=one.device) * (3 * seed + 1) // 2) % 3 - 1
            one.mul_(1 + sign.view(one.shape).to(one.dtype) * torch.finfo(one.dtype).eps)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the random numbers that are drawn in this context, or replace them by recorded ones.

    Args:
        kept: recorded numbers to use; default: record new ones.

    Attributes:
        tensors: the numbers drawn, one list for each operation.
    """

    def __init__(self, kept: list[list[Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[list[Tensor]] = []
        self._kept: Iterator[list[Tensor]] | None = None if kept is None else iter(kept)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch, and record or replace the numbers it has drawn."""
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            leaves = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
            if self._kept is None:
                self.tensors.append([one.detach().clone() for one in leaves])
            else:
                for one, kept in zip(leaves, next(self._kept), strict=True):
                    one.copy_(kept)
        return made


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that a step on ``device`` draws from."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the states that ``random_states`` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
