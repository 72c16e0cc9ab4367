"""Trace a training step into graphs: forward, backward, clipping and update."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from .capture import NotCompilableError, NotReadyError, first_line

# Gradients of at least this size are reduced separately, because joining them would need a copy.
_LARGE_BYTES = 2**22
# Maximum size of joined gradients, approximately. From 32 MiB on, the allocator would map new
# memory in every step.
_MOST_BYTES = 2**24


class GradientPlan(NamedTuple):
    """How a step uses the gradients of a micro-batch.

    Attributes:
        held: for each trained parameter, the strides and dtype of the gradient that earlier
            micro-batches have left in it, or None; empty if all are None.
        updates: whether the micro-batch ends its window.
        divisor: number of micro-batches in the window.
        ranks: number of ranks that average the gradients before an update.
    """

    held: tuple[Any, ...] = ()
    updates: bool = True
    divisor: int = 1
    ranks: int = 1


class StepTensors:
    """The tensors of model and optimizer that a step reads and changes.

    Attributes:
        names: names of the parameters, then of the buffers.
        index: from the id of a parameter or buffer to its position in ``names``.
        count: number of parameters.
        trained: positions of the parameters that get gradients and are updated.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        self.names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self.index = {id(tensor): at for at, tensor in enumerate(self._tensors)}
        self.count = sum(1 for _ in model.parameters())
        self.optimizer = optimizer
        updated = [param for group in optimizer.param_groups for param in group["params"]]
        if any(self.index.get(id(param), self.count) >= self.count for param in updated):
            raise NotCompilableError("the optimizer has parameters that are not the model's")
        self.trained = [self.index[id(param)] for param in updated if param.requires_grad]
        self._updated = {*map(id, updated)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the model."""
        return self._tensors[: self.count]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the model."""
        return self._tensors[self.count :]

    def updates(self, tensor: Tensor) -> bool:
        """Return whether the optimizer has this parameter."""
        return id(tensor) in self._updated

    def trained_tensors(self) -> list[Tensor]:
        """Return the parameters that get gradients and are updated."""
        return [self._tensors[at] for at in self.trained]

    def states(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Return (position of the parameter, name, dict) for each tensor of optimizer state."""
        # Uses get(), because reading a missing key of the state, a defaultdict, would add it.
        state_dicts = [self.optimizer.state.get(param, {}) for param in self.parameters]
        return [
            (at, name, state)
            for at, state in enumerate(state_dicts)
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]

    def twin(self, parameters: Sequence[Tensor], rates: Iterable[Tensor]) -> Any:
        """Return a copy of the optimizer for other parameters, without state.

        Args:
            parameters: the new parameters, in the order of ``names``.
            rates: the learning rate of each group, as a tensor.
        """
        twin: Any = object.__new__(type(self.optimizer))
        # Leaves out the counter that schedulers put around ``step``.
        vars(twin).update({k: v for k, v in vars(self.optimizer).items() if k != "step"})
        options = {"foreach": True, "fused": None, "capturable": True}
        groups = self.optimizer.param_groups
        twin.param_groups = [
            {
                **group,
                **{name: value for name, value in options.items() if name in group},
                "params": [parameters[self.index[id(param)]] for param in group["params"]],
                "lr": rate,
            }
            for group, rate in zip(groups, rates, strict=True)
        ]
        return twin


@dataclass
class GraphInputs:
    """The inputs of a graph, in order.

    Attributes:
        loss_factors: with ``loss_weight``, the factors of the loss and of the window's gradients.
        held: gradients of earlier micro-batches; for the update program, the joined gradients.
    """

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    rates: list[Tensor] = field(default_factory=list)
    loss_factors: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    batch: list[Tensor] = field(default_factory=list)

    def flat(self) -> list[Tensor]:
        """Return all tensors in one list."""
        return [tensor for tensors in vars(self).values() for tensor in tensors]

    def cut(self, flat: Iterable[Tensor]) -> GraphInputs:
        """Return the tensors in ``flat``, arranged in the structure of this object."""
        remaining = iter(flat)
        return GraphInputs(*([next(remaining) for _ in tensors] for tensors in vars(self).values()))


class StepFunctions:
    """Functions that run a step, or half of one, on given tensors and change them in place.

    Args:
        forward: returns the sum of the losses and the values to log.
        clip: clips the gradients of an optimizer and returns their norm.

    Attributes:
        has_norm: after a call, whether there is a norm of the gradients.
        kept: after a call, positions of the trained parameters with new gradients to keep.
    """

    def __init__(
        self,
        step_tensors: StepTensors,
        plan: GradientPlan,
        forward: Callable[[GraphInputs], tuple[Tensor, list[Tensor]]],
        clip: Callable[[Any], Tensor | None] | None,
    ) -> None:
        self._places, self._plan = step_tensors, plan
        self._forward, self._clip = forward, clip
        self._keys = [(at, name) for at, name, _ in step_tensors.states()]
        self.has_norm = False
        self.kept: list[int] = []

    def whole(self, graph_inputs: GraphInputs) -> list[Tensor]:
        """Run a whole step.

        Returns the logs, followed by the norm of the gradients if the step updates and clips, or by
        the gradients to keep if it does not update.
        """
        outputs, gradients = self._backward(graph_inputs)
        with torch.no_grad():
            if self._plan.updates:
                return outputs + self.update(graph_inputs, gradients)
            held_layouts = self._plan.held or [None] * len(gradients)
            new_grads = {
                at: grad.contiguous()
                for at, grad in enumerate(gradients)
                if grad is not None and not held_layouts[at]
            }
            self.kept = [*new_grads]
            return [*outputs, *new_grads.values()]

    def joined_gradients(self, graph_inputs: GraphInputs) -> list[Tensor]:
        """Run forward and backward; return the logs, followed by the joined gradients.

        The gradients are already divided by the number of ranks.
        """
        outputs, gradients = self._backward(graph_inputs)
        trained = [graph_inputs.parameters[at] for at in self._places.trained]
        with torch.no_grad():
            return outputs + join_gradients(trained, gradients)

    def update_by_joined(self, graph_inputs: GraphInputs) -> list[Tensor]:
        """Clip the joined gradients in ``given.held`` and update; return [norm], or [] if none."""
        trained = [graph_inputs.parameters[at] for at in self._places.trained]
        with torch.no_grad():
            return self.update(graph_inputs, split_joined(trained, graph_inputs.held))

    def _backward(self, graph_inputs: GraphInputs) -> tuple[list[Tensor], list[Tensor | None]]:
        leaves = [
            param.detach().requires_grad_(user_param.requires_grad)
            for param, user_param in zip(
                graph_inputs.parameters, self._places.parameters, strict=True
            )
        ]
        plan = self._plan
        total, logs = self._forward(replace(graph_inputs, parameters=leaves))
        with torch.autocast(leaves[0].device.type, enabled=False):
            trained = [leaves[at] for at in self._places.trained]
            # Divides the loss by the number of ranks, to save a division of all gradients.
            divisor = plan.divisor * (plan.ranks if plan.updates else 1)
            scaled = total if divisor == 1 else total / divisor
            if graph_inputs.loss_factors:
                scaled = scaled * graph_inputs.loss_factors[0].to(total.dtype)
            grads = torch.autograd.grad(scaled, trained, allow_unused=True)
            gradients = _separate(grads)
        with torch.no_grad():
            held_grads = iter(graph_inputs.held)
            for at in (at for at, is_held in enumerate(plan.held) if is_held):
                before, new_grad = next(held_grads), gradients[at]
                if plan.updates and plan.ranks > 1:
                    before = before / plan.ranks
                if new_grad is None:
                    gradients[at] = before
                else:
                    gradients[at] = before + new_grad if plan.updates else before.add_(new_grad)
        # Copies, because the caller keeps the values, and one may be an input or be logged twice.
        return [log.detach().clone() for log in logs], gradients

    def update(self, graph_inputs: GraphInputs, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Clip and update; return a list with the norm of the gradients, empty without one."""
        twin = self._places.twin(graph_inputs.parameters, graph_inputs.rates)
        if graph_inputs.loss_factors:
            factor = graph_inputs.loss_factors[1]
            # Multiplying by 0 would keep NaN.
            gradients = [
                grad if grad is None else (grad * factor.to(grad.dtype)).where(factor != 0, 0.0)
                for grad in gradients
            ]
        for at, gradient in zip(self._places.trained, gradients, strict=True):
            # Set, because clipping only uses parameters that require gradients.
            graph_inputs.parameters[at].requires_grad_().grad = gradient
        states: dict[Tensor, dict[str, Any]] = {param: {} for param in graph_inputs.parameters}
        for (at, name), value in zip(self._keys, graph_inputs.states, strict=True):
            # Adam computes powers with the number of steps, which need double precision.
            exact = value.double() if name == "step" and value.ndim == 0 else value
            states[graph_inputs.parameters[at]][name] = exact
        keys = {param: set(state) for param, state in states.items()}
        twin.state = defaultdict(dict, states)
        norm = None if self._clip is None else self._clip(twin)
        settings = _settings(twin)
        with _as_compiling():
            twin.step()
        if _settings(twin) != settings:
            name = type(twin).__name__
            raise NotCompilableError(f"each step of {name} changes its attributes or settings")
        for param in graph_inputs.parameters:
            param.requires_grad_(False).grad = None
            if set(twin.state[param]) != keys[param]:
                raise NotReadyError("some parameters have no optimizer state yet")
        for (at, name), value in zip(self._keys, graph_inputs.states, strict=True):
            if (new_value := twin.state[graph_inputs.parameters[at]][name]) is not value:
                value.copy_(new_value)
        self.has_norm = norm is not None
        return [] if norm is None else [norm.clone()]


def _settings(optimizer: Any) -> list[Any]:
    """Return the attributes and settings of an optimizer, without parameters and state."""
    left_out = ("state", "param_groups")
    attributes = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    return [attributes, *({**group, "params": None} for group in optimizer.param_groups)]


def _separate(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return gradients in separate memory; autograd returns one tensor for both terms of a sum."""
    separate: list[Tensor | None] = []
    memories: set[int] = set()
    for grad in gradients:
        if grad is not None:
            memory = grad.untyped_storage()._cdata
            grad = grad.clone() if memory in memories or 0 in grad.stride() else grad
            memories.add(memory)
        separate.append(grad)
    return separate


def join_gradients(like: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Join gradients into 1-d tensors, to reduce several at a time over the ranks.

    Which gradients are joined depends only on ``like``, so it is the same on all ranks. A missing
    gradient counts as zeros.
    """
    filled = [
        (torch.zeros_like(tensor) if gradient is None else gradient).reshape(-1)
        for tensor, gradient in zip(like, gradients, strict=True)
    ]
    return [torch.cat([filled[at] for at in bucket]) for bucket in _bucket_indices(like)]


def split_joined(like: Sequence[Tensor], joined: Sequence[Tensor]) -> list[Tensor]:
    """Return joined gradients in the shapes of ``like``."""
    by_index: dict[int, Tensor] = {}
    for flat, bucket in zip(joined, _bucket_indices(like), strict=True):
        chunks = torch.split(flat, [like[at].numel() for at in bucket])
        by_index |= {at: chunk.view_as(like[at]) for at, chunk in zip(bucket, chunks, strict=True)}
    return [by_index[at] for at in range(len(like))]


def _bucket_indices(like: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors to join; large tensors are not joined with others."""
    buckets: dict[Any, list[int]] = {}
    num_bytes: Counter[torch.dtype] = Counter()
    for at, tensor in enumerate(like):
        if tensor.nbytes >= _LARGE_BYTES:
            buckets[at] = [at]
        else:
            buckets.setdefault((tensor.dtype, num_bytes[tensor.dtype] // _MOST_BYTES), []).append(
                at
            )
            num_bytes[tensor.dtype] += tensor.nbytes
    return list(buckets.values())


@contextmanager
def _as_compiling() -> Iterator[None]:
    """Pretend that torch compiles, so that optimizers accept tensors instead of numbers."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def trace(function: Callable[[GraphInputs], list[Tensor]], tensors: GraphInputs) -> GraphModule:
    """Return the graph of a function without running it.

    Raises:
        NotCompilableError: the function depends on values, or an operation cannot be traced.
    """
    inputs = [tensor.detach() for tensor in tensors.flat()]
    try:
        with warnings.catch_warnings():
            # In some builds, setting the flags warns about missing hardware.
            warnings.simplefilter("ignore")
            # Without MKL-DNN, recurrent layers become matrix products, which can be compiled.
            with torch.backends.mkldnn.flags(enabled=False):
                make_graph = make_fx(
                    lambda *flat: function(tensors.cut(flat)), _DECOMPOSITIONS, "fake"
                )
                graph = make_graph(*inputs)
    except NotCompilableError:
        raise
    except Exception as error:
        raise NotCompilableError(f"tracing fails: {first_line(error)}") from error
    for node in reversed(graph.graph.nodes):
        # Removes time stamps for a profiler.
        if node.op == "call_function" and str(node.target).startswith("profiler."):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _addmm(bias: Tensor, matrix: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Add the bias after the product, where the compiler can fuse it with the next operation.

    The negative bias is subtracted, because the compiler would turn a sum into ``addmm`` again.
    ``addmm`` is kept for half precision, where a separate sum would round once more, and on GPUs,
    where the compiler chooses.
    """
    if (beta, alpha) != (1, 1) or bias.dtype.itemsize < 4 or bias.device.type != "cpu":
        return NotImplemented
    return torch.mm(matrix, other) - -bias


def _bernoulli(tensor: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Draw random numbers by ``native_dropout`` for tensors that are not contiguous.

    The order of the numbers depends on the memory layout. The compiler keeps the layout of the
    input only in ``native_dropout``.
    """
    if tensor.is_contiguous() or generator is not None or tensor.device.type != "cpu":
        return NotImplemented
    return tensor.copy_(torch.native_dropout(tensor, 1 - p, True)[1])


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.bernoulli_.float: _bernoulli,
}
