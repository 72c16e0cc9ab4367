"""A training step as graphs: forward, backward, clipping and update, traced without running."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from .errors import NotCompilableError, NotReadyError, first_line

# From here on a gradient is reduced where it lies: that takes less time than a copy.
_LARGE_BYTES = 2**22
# About so many of small ones are one tensor: from 32 MiB on it would be mapped anew in every step.
_MOST_BYTES = 2**24


class Plan(NamedTuple):
    """What becomes of the gradients of a micro-batch.

    Attributes:
        held: by trained parameter, strides and type of the gradient of earlier micro-batches to add
            to, None without one; empty if there are none.
        updates: the window ends with it.
        divisor: the micro-batches of the window.
        ranks: how many average the gradients before an update.
    """

    held: tuple[Any, ...] = ()
    updates: bool = True
    divisor: int = 1
    ranks: int = 1


class Places:
    """Where the tensors are that a step reads and changes.

    Attributes:
        names: of the parameters, then of the buffers.
        index: by the id of a tensor, which of ``tensors`` it is.
        count: how many of them are parameters.
        trained: indices of the parameters that get gradients and are updated.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        self.names = [name for name, _ in named]
        self._tensors = [one for _, one in named]
        self.index = {id(one): at for at, one in enumerate(self._tensors)}
        self.count = sum(1 for _ in model.parameters())
        self.optimizer = optimizer
        updated = [one for group in optimizer.param_groups for one in group["params"]]
        if any(self.index.get(id(one), self.count) >= self.count for one in updated):
            raise NotCompilableError("the optimizer has parameters that are not the model's")
        self.trained = [self.index[id(one)] for one in updated if one.requires_grad]
        self._updated = {*map(id, updated)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the model."""
        return self._tensors[: self.count]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the model."""
        return self._tensors[self.count :]

    def updates(self, one: Tensor) -> bool:
        """Whether the optimizer has this parameter."""
        return id(one) in self._updated

    def trained_tensors(self) -> list[Tensor]:
        """The parameters that get gradients."""
        return [self._tensors[at] for at in self.trained]

    def states(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Where the tensors of the optimizer's state are: index of the parameter, name, dict."""
        # Not the state itself, a defaultdict: a look must not add to it.
        known = [self.optimizer.state.get(one, {}) for one in self.parameters]
        return [
            (at, name, state)
            for at, state in enumerate(known)
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]

    def twin(self, parameters: Sequence[Tensor], rates: Iterable[Tensor]) -> Any:
        """The optimizer over other tensors, with learning rates that are tensors; no state."""
        made: Any = object.__new__(type(self.optimizer))
        # Schedulers put a counter around its step.
        vars(made).update({k: v for k, v in vars(self.optimizer).items() if k != "step"})
        ways = {"foreach": True, "fused": None, "capturable": True}
        groups = self.optimizer.param_groups
        made.param_groups = [
            {
                **group,
                **{name: way for name, way in ways.items() if name in group},
                "params": [parameters[self.index[id(one)]] for one in group["params"]],
                "lr": rate,
            }
            for group, rate in zip(groups, rates, strict=True)
        ]
        return made


@dataclass
class Tensors:
    """What a graph takes, in its order.

    Attributes:
        weights: with ``loss_weight``, the share of the micro-batch and the factor of the window.
    """

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    rates: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    batch: list[Tensor] = field(default_factory=list)

    def flat(self) -> list[Tensor]:
        """All in one list."""
        return [one for part in vars(self).values() for one in part]

    def lengths(self) -> list[int]:
        """How many there are of each kind."""
        return [len(part) for part in vars(self).values()]

    def cut(self, flat: Iterable[Tensor]) -> Tensors:
        """As many other tensors in the same order."""
        rest = iter(flat)
        return Tensors(*([next(rest) for _ in part] for part in vars(self).values()))


class StepFunctions:
    """A step as functions of all its tensors, which change in place.

    Args:
        forward: the total of the losses and what is logged, by parameters, buffers and batch.
        clip: clips the gradients of an optimizer, and returns their norm.

    Attributes:
        has_norm: after a call, whether there is a norm of the gradients.
        kept: after a call, for which trained parameters there are new gradients to be kept.
    """

    def __init__(
        self,
        places: Places,
        plan: Plan,
        forward: Callable[[Tensors], tuple[Tensor, list[Tensor]]],
        clip: Callable[[Any], Tensor | None] | None,
    ) -> None:
        self._places, self._plan = places, plan
        self._forward, self._clip = forward, clip
        self._keys = [(at, name) for at, name, _ in places.states()]
        self.has_norm = False
        self.kept: list[int] = []

    def whole(self, given: Tensors) -> list[Tensor]:
        """Step; returns logs, then the norm of the gradients or the gradients to be kept."""
        outputs, gradients = self._backward(given)
        with torch.no_grad():
            if self._plan.updates:
                return outputs + self.update(given, gradients)
            held = self._plan.held
            self.kept = [
                at
                for at, one in enumerate(gradients)
                if one is not None and not (held and held[at])
            ]
            return outputs + [
                one.contiguous() for at in self.kept if (one := gradients[at]) is not None
            ]

    def joined_gradients(self, given: Tensors) -> list[Tensor]:
        """Run forward and backward; returns logs, then the gradients over ranks, in parts."""
        outputs, gradients = self._backward(given)
        wanted = [given.parameters[at] for at in self._places.trained]
        with torch.no_grad():
            return outputs + joined(wanted, gradients)

    def update_by_joined(self, given: Tensors) -> list[Tensor]:
        """Clip and step by gradients in parts, those that are held; returns the norm, if any."""
        wanted = [given.parameters[at] for at in self._places.trained]
        with torch.no_grad():
            return self.update(given, taken_apart(wanted, given.held))

    def _backward(self, given: Tensors) -> tuple[list[Tensor], list[Tensor | None]]:
        leaves = [
            one.detach().requires_grad_(own.requires_grad)
            for one, own in zip(given.parameters, self._places.parameters, strict=True)
        ]
        plan = self._plan
        total, logs = self._forward(replace(given, parameters=leaves))
        with torch.autocast(leaves[0].device.type, enabled=False):
            wanted = [leaves[at] for at in self._places.trained]
            # Not the gradients by the ranks: that would be another pass over them.
            divisor = plan.divisor * (plan.ranks if plan.updates else 1)
            scaled = total if divisor == 1 else total / divisor
            if given.weights:
                scaled = scaled * given.weights[0].to(total.dtype)
            found = torch.autograd.grad(scaled, wanted, allow_unused=True)
            gradients = _of_their_own(found)
        with torch.no_grad():
            held = iter(given.held)
            for at in (at for at, is_held in enumerate(plan.held) if is_held):
                before, new = next(held), gradients[at]
                if plan.updates and plan.ranks > 1:
                    before = before / plan.ranks
                if new is None:
                    gradients[at] = before
                else:
                    gradients[at] = before + new if plan.updates else before.add_(new)
        # Copies: a value may be an input, or come twice, and the caller keeps it.
        return [one.detach().clone() for one in logs], gradients

    def update(self, given: Tensors, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Clip and step; returns the norm of the gradients, if there is one."""
        twin = self._places.twin(given.parameters, given.rates)
        if given.weights:
            factor = given.weights[1]
            # Not times 0, which would leave a NaN.
            gradients = [
                one if one is None else (one * factor.to(one.dtype)).where(factor != 0, 0.0)
                for one in gradients
            ]
        for at, gradient in zip(self._places.trained, gradients, strict=True):
            # As clipping expects it.
            given.parameters[at].requires_grad_().grad = gradient
        states: dict[Tensor, dict[str, Any]] = {one: {} for one in given.parameters}
        for (at, name), value in zip(self._keys, given.states, strict=True):
            # A count of steps in double precision: Adam's corrections are powers of it.
            exact = value.double() if name == "step" and value.ndim == 0 else value
            states[given.parameters[at]][name] = exact
        known = {one: set(state) for one, state in states.items()}
        twin.state = _State(states)
        norm = None if self._clip is None else self._clip(twin)
        settings = _settings(twin)
        with _as_compiling():
            twin.step()
        if _settings(twin) != settings:
            name = type(twin).__name__
            raise NotCompilableError(f"each step of {name} changes its attributes or settings")
        for one in given.parameters:
            one.requires_grad_(False).grad = None
            if set(twin.state[one]) != known[one]:
                raise NotReadyError("some parameters have no optimizer state yet")
        for (at, name), value in zip(self._keys, given.states, strict=True):
            if (new := twin.state[given.parameters[at]][name]) is not value:
                value.copy_(new)
        self.has_norm = norm is not None
        return [] if norm is None else [norm.clone()]


def _settings(optimizer: Any) -> list[Any]:
    """All that an optimizer keeps, except for its parameters and their state."""
    left_out = ("state", "param_groups")
    own = {name: one for name, one in vars(optimizer).items() if name not in left_out}
    return [own, *({**group, "params": None} for group in optimizer.param_groups)]


def _of_their_own(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Gradients that can be changed in place: a sum gives one tensor to all that it adds up."""
    kept: list[Tensor | None] = []
    seen: set[int] = set()
    for one in gradients:
        if one is not None:
            memory = one.untyped_storage()._cdata
            kept.append(one.clone() if memory in seen or 0 in one.stride() else one)
            seen.add(memory)
        else:
            kept.append(None)
    return kept


def joined(like: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients as what the ranks add up: in tensors of one dimension, by ``like`` alone."""
    filled = [
        (torch.zeros_like(one) if gradient is None else gradient).reshape(-1)
        for one, gradient in zip(like, gradients, strict=True)
    ]
    return [torch.cat([filled[at] for at in part]) for part in _parts(like)]


def taken_apart(like: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that were joined, in the shapes of ``like``."""
    found: dict[int, Tensor] = {}
    for whole, part in zip(parts, _parts(like), strict=True):
        pieces = torch.split(whole, [like[at].numel() for at in part])
        found |= {at: one.view_as(like[at]) for at, one in zip(part, pieces, strict=True)}
    return [found[at] for at in range(len(like))]


def _parts(like: Sequence[Tensor]) -> list[list[int]]:
    """Which are joined, by index: small ones of a type up to a size; a large one stays alone."""
    parts: dict[Any, list[int]] = {}
    taken: Counter[torch.dtype] = Counter()
    for at, one in enumerate(like):
        if one.nbytes >= _LARGE_BYTES:
            parts[at] = [at]
        else:
            parts.setdefault((one.dtype, taken[one.dtype] // _MOST_BYTES), []).append(at)
            taken[one.dtype] += one.nbytes
    return list(parts.values())


class _State(dict[Tensor, dict[str, Any]]):
    def __missing__(self, key: Tensor) -> dict[str, Any]:
        return self.setdefault(key, {})


@contextmanager
def _as_compiling() -> Iterator[None]:
    """Let optimizers take tensors for numbers that change from step to step."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def trace(function: Callable[[Tensors], list[Tensor]], tensors: Tensors) -> GraphModule:
    """Return the graph of a function, without running it.

    Raises:
        NotCompilableError: it depends on values, or has an operation that cannot be traced.
    """
    inputs = [one.detach() for one in tensors.flat()]
    try:
        cut = tensors.cut
        # Without MKL-DNN, recurrent layers become products of matrices, which can be compiled.
        with warnings.catch_warnings():
            # The flags of some builds warn about hardware that is not there.
            warnings.simplefilter("ignore")
            with torch.backends.mkldnn.flags(enabled=False):
                made = make_fx(lambda *flat: function(cut(flat)), _DECOMPOSITIONS, "fake")
                graph = made(*inputs)
    except NotCompilableError:
        raise
    except Exception as error:
        raise NotCompilableError(f"tracing fails: {first_line(error)}") from error
    for node in reversed(graph.graph.nodes):
        # Time stamps for a profiler.
        if node.op == "call_function" and str(node.target).startswith("profiler."):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _addmm(bias: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """With the bias where it costs nothing: as a part of what follows, not as a copy before it.

    It is subtracted, as the compiler would make a sum one call again. Half precision would be
    rounded once more, and on GPUs the compiler decides by itself.
    """
    if (beta, alpha) != (1, 1) or bias.dtype.itemsize < 4 or bias.device.type != "cpu":
        return NotImplemented
    return torch.mm(one, other) - -bias


def _bernoulli(one: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Draw as dropout does, where the compiler would draw in the order of another layout.

    Which number goes where depends on the layout, and the compiler keeps it for this call alone.
    """
    if one.is_contiguous() or generator is not None or one.device.type != "cpu":
        return NotImplemented
    return one.copy_(torch.native_dropout(one, 1 - p, True)[1])


_DECOMPOSITIONS: dict[Any, Any] = {
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.bernoulli_.float: _bernoulli,
}
