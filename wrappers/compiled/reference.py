"""The usual step on copies of model and optimizer, and how far a program may be from it."""

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
from .trace import Places, Plan, joined, taken_apart

# By kind (weights, state, logs, ...) and name.
Values = Mapping[str, Mapping[str, Tensor]]

# By which part of the change of a step a program may differ at once, without a closer look.
_AT_ONCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# How much farther a program may be from the exact step than eager steps are.
_FACTOR = 4.0
# Eager steps from weights that are one rounding apart: they show what rounding does to a step.
_NUDGES = 3


class EagerStep:
    """A usual step on copies.

    Args:
        origin: the model and optimizer that are copied; they stay as they are.
        batch: a preprocessed batch.
        dtype: of the copies and the batch; default: as they are.
        nudge: seed of roundings by which the weights of the copy differ; 0: they do not.
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
        self.places = Places(self.model, self.optimizer)

    def backward(self, plan: Plan, share: float | Tensor) -> dict[str, Tensor]:
        """Run forward and backward; returns the logs."""
        total, logs = step_losses(self.model, self._batch)
        (total / plan.divisor * share).backward()  # type: ignore[no-untyped-call]
        return {name: one.detach() for name, one in logs.items() if isinstance(one, Tensor)}

    def parts(self, plan: Plan) -> list[Tensor]:
        """Return the gradients as the ranks add them up."""
        wanted = self.places.trained_tensors()
        return [one / plan.ranks for one in joined(wanted, [one.grad for one in wanted])]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the copies hold."""
        parameters = zip(self.places.names, self.places.parameters, strict=False)
        return {name: one.grad for name, one in parameters if one.grad is not None}


def update(
    places: Places,
    clip: Callable[[Any], Tensor | None] | None,
    factor: float | Tensor,
    parts: Sequence[Tensor] = (),
) -> Tensor | None:
    """Clip and step by gradients as usual; returns their norm.

    Args:
        factor: multiplies the gradients; 0 stands for no gradients at all.
        parts: the gradients, as the ranks have added them up; default: those that are held.
    """
    wanted = places.trained_tensors()
    given = taken_apart(wanted, parts) if parts else [one.grad for one in wanted]
    for one, gradient in zip(wanted, given, strict=True):
        if gradient is not None:
            own = gradient.to(one.dtype, copy=True)
            one.grad = torch.zeros_like(own) if factor == 0 else own.mul_(factor)
    norm = None if clip is None else clip(places.optimizer)
    places.optimizer.step()
    return norm


def copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of both, with the gradients; schedulers stay with the original optimizer."""
    copies = copy.deepcopy((model, optimizer))
    for one, other in zip(model.parameters(), copies[0].parameters(), strict=True):
        # Copies of parameters have none.
        other.grad = None if one.grad is None else one.grad.clone()
    return copies


def cloned(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, batch)


def changed_values(places: Places) -> dict[str, dict[str, Tensor]]:
    """Return what an update changes: weights, buffers and the optimizer's state."""
    names, count = places.names, places.count
    kinds = {
        "weights": dict(zip(names[:count], places.parameters, strict=True)),
        "buffers": dict(zip(names[count:], places.buffers, strict=True)),
    }
    for at, name, state in places.states():
        kinds.setdefault(name, {})[f"{names[at]}: {name}"] = state[name]
    return kinds


def differing(
    made: Values, start: Values, eager: Callable[..., Values], low: float, slack: float = 1.0
) -> str | None:
    """Name the tensor in which a program differs most from the usual step; None if it does not.

    Values that differ by more than a rounding are compared with the step in double precision: the
    program may be ``_FACTOR`` times as far from it as eager steps whose weights differ by one
    rounding.

    Args:
        made: the values that the program has computed.
        start: the same tensors before the step, as far as there were any.
        eager: makes the usual step on copies; takes ``dtype`` and ``nudge`` of ``EagerStep``.
        low: the rounding of autocast, 0 without it.
        slack: multiplies all that is allowed.
    """
    # Drawn once: in double precision other numbers would be drawn.
    drawn = Draws()
    with drawn:
        usual = eager()
    is_close = partial(_is_close, made, start=start, low=low, slack=slack)
    wrong = [kind for kind in usual if not is_close(usual, kind=kind)]
    if not wrong:
        return None
    try:
        with Draws(drawn.tensors):
            exact = eager(dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, StopIteration):
        # Its forward names a data type, or draws otherwise in double precision.
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
    low: float,
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
            tolerance = max(tolerance, _AT_ONCE.get(new.dtype, 1e-3))
            epsilon = max(epsilon, torch.finfo(new.dtype).eps)
    size = _distance(wanted, {}, kind)
    way = _distance(wanted, start, kind)
    # In half precision, rounding hides all but coarse differences.
    limit = allowed + max(tolerance, 4 * low) * way + 2 * epsilon * size
    return _distance(made, wanted, kind) <= slack * limit + torch.finfo(torch.float32).tiny


def _distance(some: Values, others: Values, kind: str) -> float:
    own, other = some[kind], others.get(kind, {})
    return math.sqrt(sum(_off(one, other.get(name)) ** 2 for name, one in own.items()))


def _off(one: Tensor, other: Tensor | None) -> float:
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
    way = _off(one, start.get(kind, {}).get(name))
    return _off(new, one) / max(way, 1e-300)


def _cast(one: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(one, Tensor) and one.is_floating_point()
    return one.to(dtype) if is_number else one


def _nudge(model: nn.Module, seed: int) -> None:
    """Change each weight by at most one rounding."""
    with torch.no_grad():
        for one in model.parameters():
            # Without random numbers, which would be kept as numbers of the step.
            sign = (torch.arange(one.numel(), device=one.device) * (3 * seed + 1) // 2) % 3 - 1
            one.mul_(1 + sign.view(one.shape).to(one.dtype) * torch.finfo(one.dtype).eps)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the random numbers that are drawn inside, or gives those that were kept.

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
        """Run an operation of torch, and keep or replace what it has drawn."""
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            leaves = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
            if self._kept is None:
                self.tensors.append([one.detach().clone() for one in leaves])
            else:
                for one, kept in zip(leaves, next(self._kept), strict=True):
                    one.copy_(kept)
        return made


def draws_from(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that a step on ``device`` draws from."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def draw_from(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set these generators."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
