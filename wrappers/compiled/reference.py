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
            self._batch = tree_map(lambda leaf: _cast(leaf, dtype), batch)
            for state in self.optimizer.state.values():
                state.update({name: _cast(value, dtype) for name, value in state.items()})
        if nudge:
            _nudge(self.model, nudge)
        self.places = StepTensors(self.model, self.optimizer)

    def backward(self, plan: GradientPlan, loss_factor: float | Tensor) -> dict[str, Tensor]:
        """Run forward and backward; return the logs."""
        total, logs = step_losses(self.model, self._batch)
        (total / plan.divisor * loss_factor).backward()  # type: ignore[no-untyped-call]
        return {name: value.detach() for name, value in logs.items() if isinstance(value, Tensor)}

    def parts(self, plan: GradientPlan) -> list[Tensor]:
        """Return the joined gradients, scaled so that their sum over the ranks is the mean."""
        trained = self.places.trained_tensors()
        return [
            gradient / plan.ranks
            for gradient in join_gradients(trained, [param.grad for param in trained])
        ]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the copied parameters, by name."""
        parameters = zip(self.places.names, self.places.parameters, strict=False)
        return {name: param.grad for name, param in parameters if param.grad is not None}


def update(
    step_tensors: StepTensors,
    clip: Callable[[Any], Tensor | None] | None,
    factor: float | Tensor,
    joined: Sequence[Tensor] = (),
) -> Tensor | None:
    """Clip the gradients and update eagerly; return the norm of the gradients.

    Args:
        factor: the factor of the gradients; 0 makes them zero, even if they are NaN.
        joined: the joined gradients after their reduction; default: ``grad`` of the parameters.
    """
    trained = step_tensors.trained_tensors()
    gradients = split_joined(trained, joined) if joined else [param.grad for param in trained]
    for param, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            scaled = gradient.to(param.dtype, copy=True)
            param.grad = torch.zeros_like(scaled) if factor == 0 else scaled.mul_(factor)
    norm = None if clip is None else clip(step_tensors.optimizer)
    step_tensors.optimizer.step()
    return norm


def copied(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of both, including the gradients, which deepcopy does not copy."""
    copies = copy.deepcopy((model, optimizer))
    for param, other in zip(model.parameters(), copies[0].parameters(), strict=True):
        other.grad = None if param.grad is None else param.grad.clone()
    return copies


def clone_batch(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def changed_values(step_tensors: StepTensors) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that an update changes: weights, buffers and the optimizer's state."""
    names, count = step_tensors.names, step_tensors.count
    kinds = {
        "weights": dict(zip(names[:count], step_tensors.parameters, strict=True)),
        "buffers": dict(zip(names[count:], step_tensors.buffers, strict=True)),
    }
    for at, name, state in step_tensors.states():
        kinds.setdefault(name, {})[f"{names[at]}: {name}"] = state[name]
    return kinds


def largest_difference(
    actual: Values,
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
        actual: the values that the program has computed.
        start: the same tensors before the step, if they existed.
        eager: runs an eager step on copies; takes ``dtype`` and ``nudge`` of ``EagerStep``.
        autocast_eps: the rounding error of autocast's dtype; 0 without autocast.
        slack: the factor of the allowed difference.
    """
    # All steps use the recorded random numbers, because double precision would draw others.
    drawn = Draws()
    with drawn:
        usual = eager()
    is_close = partial(_is_close, actual, start=start, autocast_eps=autocast_eps, slack=slack)
    wrong = [kind for kind in usual if not is_close(usual, kind=kind)]
    if not wrong:
        return None
    try:
        with Draws(drawn.tensors):
            exact = eager(dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, StopIteration):
        # The forward does not support double precision, or draws other random numbers there.
        exact = usual
    references = [usual]
    for seed in range(1, _NUDGES + 1):
        with Draws(drawn.tensors):
            references.append(eager(nudge=seed))
    for kind in wrong:
        spread = max(_distance(other, exact, kind) for other in references)
        if not is_close(exact, kind=kind, allowed=_FACTOR * spread):
            return max(exact[kind], key=lambda name: _relative(actual, exact, start, kind, name))
    return None


def _is_close(
    actual: Values,
    expected: Values,
    *,
    start: Values,
    kind: str,
    autocast_eps: float,
    slack: float,
    allowed: float = 0.0,
) -> bool:
    if list(actual.get(kind, {})) != list(expected[kind]):
        return False
    tolerance = epsilon = 0.0
    for name, value in expected[kind].items():
        actual_value = actual[kind][name]
        if not value.is_floating_point():
            if not torch.equal(value, actual_value):
                return False
        elif not torch.equal(value.isfinite(), actual_value.isfinite()):
            return False
        else:
            tolerance = max(tolerance, _TOLERANCE.get(actual_value.dtype, 1e-3))
            epsilon = max(epsilon, torch.finfo(actual_value.dtype).eps)
    size = _distance(expected, {}, kind)
    change = _distance(expected, start, kind)
    # Half precision rounds so much that only large differences can be detected.
    limit = allowed + max(tolerance, 4 * autocast_eps) * change + 2 * epsilon * size
    return _distance(actual, expected, kind) <= slack * limit + torch.finfo(torch.float32).tiny


def _distance(values: Values, baseline: Values, kind: str) -> float:
    tensors, other = values[kind], baseline.get(kind, {})
    return math.sqrt(
        sum(_difference(value, other.get(name)) ** 2 for name, value in tensors.items())
    )


def _difference(tensor: Tensor, other: Tensor | None) -> float:
    if not tensor.is_floating_point():
        return 0.0
    finite = tensor.isfinite()
    difference = tensor.detach().double()[finite]
    if other is not None:
        difference = difference - other.detach().double()[finite]
    return float(difference.norm())


def _relative(actual: Values, exact: Values, start: Values, kind: str, name: str) -> float:
    value, actual_value = exact[kind][name], actual[kind].get(name)
    if actual_value is None or not torch.equal(value.isfinite(), actual_value.isfinite()):
        return math.inf
    if not value.is_floating_point():
        return 0.0 if torch.equal(value, actual_value) else math.inf
    change = _difference(value, start.get(kind, {}).get(name))
    return _difference(actual_value, value) / max(change, 1e-300)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_number else value


def _nudge(model: nn.Module, seed: int) -> None:
    """Change each weight by at most one rounding error."""
    with torch.no_grad():
        for param in model.parameters():
            # Computed without random numbers, which ``Draws`` would record as part of the step.
            sign = (torch.arange(param.numel(), device=param.device) * (3 * seed + 1) // 2) % 3 - 1
            param.mul_(1 + sign.view(param.shape).to(param.dtype) * torch.finfo(param.dtype).eps)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the random numbers that are drawn in this context, or replace them by recorded ones.

    Args:
        recorded: numbers to use; default: record new ones.

    Attributes:
        tensors: the numbers drawn, one list for each operation.
    """

    def __init__(self, recorded: list[list[Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[list[Tensor]] = []
        self._kept: Iterator[list[Tensor]] | None = None if recorded is None else iter(recorded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch, and record or replace the numbers it has drawn."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if self._kept is None:
                self.tensors.append([leaf.detach().clone() for leaf in leaves])
            else:
                for leaf, recorded in zip(leaves, next(self._kept), strict=True):
                    leaf.copy_(recorded)
        return result


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that a step on ``device`` draws from."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set the states that ``random_states`` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
