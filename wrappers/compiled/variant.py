"""One compiled variant of the step: its programs, its contract and its verification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed
from torch.fx import Interpreter

from ..layout import broadcast_from_first_rank, get_parameters, unreduced
from ..steps.preprocess import get_device
from .capture import Captured, NotCompilableError, batch_reader, capture, tensors_in
from .contract import Contract, share_memory
from .cuda_graph import CudaGraph, warm_up
from .program import Compiler, Program
from .reference import EagerStep, changed_values, clone_batch, update
from .trace import (
    GradientPlan,
    GraphInputs,
    StepFunctions,
    StepTensors,
    join_gradients,
    split_joined,
    trace,
)
from .verifier import Verifier

# If a variant must be replaced after fewer steps than this, it was not worth compiling.
_FEW_USES = 2
_NORM = "the norm of the gradients"


class StepVariant:
    """A compiled step for one gradient plan, one kind of batch and one state of the model.

    It has one program. If several ranks average gradients, it has two: one computes the gradients,
    the other runs the update. ``Verifier`` compares some of its steps with the usual step, which
    runs on copies.

    Args:
        plan: how the step uses gradients.
        batch: a preprocessed batch.
        compiler: turns graphs into programs.
        graphs: the CUDA graphs of the other variants. They run one after the other, so this one
            uses their memory for its activations, and adds its graphs.

    Attributes:
        moved_states: dicts of the optimizer's state with the names of numbers that were moved from
            the CPU to the device.
        failure: why the last update ran in eager mode, or None. The variant must not be used
            again after a failure.

    Raises:
        NotCompilableError: the step cannot be compiled.
    """

    def __init__(
        self,
        wrapper: Any,
        optim_wrapper: Any,
        plan: GradientPlan,
        batch: Any,
        *,
        compiler: Compiler,
        graphs: WeakSet[CudaGraph],
    ) -> None:
        model: Any = wrapper.module
        self._model, self._optimizer = model, optim_wrapper.optimizer
        self._clip, self._compiler, self._graphs = optim_wrapper.clip, compiler, graphs
        self._plan, self._group, self._device = plan, wrapper.data_group, get_device(model)
        captured = capture(model, batch)
        self._pick = batch_reader([where for kind, where in captured.reads if kind == "batch"])
        self._names = [*captured.logs]
        self._constants = captured.constants
        self._places = step_tensors = StepTensors(model, self._optimizer)
        self._trained = step_tensors.trained_tensors()
        self._shared = shared_buffers(wrapper) if plan.ranks > 1 else []
        self.failure: NotCompilableError | None = None
        self._uses, self._verifier = 0, Verifier(model, self._optimizer, self._device)
        with _state_on(self._device, step_tensors) as self.moved_states:
            self._make(captured, optim_wrapper, batch)
            self._contract = Contract(wrapper, optim_wrapper, captured, batch)
        if not self._contract.holds(batch):
            raise NotCompilableError(
                "a torch mode, anomaly detection, a saved-tensors hook or a global module or "
                "optimizer hook is active, or frozen parameters have gradients"
            )
        self._kind = _kind(batch)
        self._addresses = self._located()

    def _make(self, captured: Captured, optim_wrapper: Any, batch: Any) -> None:
        step_tensors, plan, device = self._places, self._plan, self._device
        # A learning rate may be a tensor that changes in place.
        self._rates = [_Number(group["lr"], device) for group in self._optimizer.param_groups]
        self._loss_factor, self._gradient_factor = _Number(1.0, device), _Number(1.0, device)
        steps = StepFunctions(step_tensors, plan, _forward(captured, step_tensors), self._clip)
        weighs = optim_wrapper.loss_weight is not None
        tensors = GraphInputs(
            step_tensors.parameters,
            step_tensors.buffers,
            [state[name] for _, name, state in step_tensors.states()],
            [rate.tensor for rate in self._rates],
            [self._loss_factor.tensor, self._gradient_factor.tensor] if weighs else [],
            self._kept_gradients(),
            self._pick(batch),
        )
        if len(devices := {str(tensor.device) for tensor in tensors.flat()}) > 1:
            raise NotCompilableError(f"there are tensors on {' and on '.join(sorted(devices))}")
        named = zip(step_tensors.names, step_tensors.parameters, strict=False)
        if alone := [
            name
            for name, tensor in named
            if tensor.requires_grad and not step_tensors.updates(tensor)
        ]:
            raise NotCompilableError(
                f"{alone[0]} gets gradients, but the optimizer does not update it"
            )
        if share_memory([*tensors.parameters, *tensors.buffers, *tensors.states]):
            raise NotCompilableError("parameters, buffers or optimizer state share memory")
        self._update: Program | None = None
        moved = [*tensors.states, *tensors.rates, *tensors.loss_factors]
        if plan.updates and plan.ranks > 1:
            self._fixed = [*tensors.parameters, *tensors.buffers, *tensors.loss_factors]
            self._run = self._program(steps.joined_gradients, replace(tensors, states=[], rates=[]))
            self._moved = [*tensors.parameters, *moved]
            joined = join_gradients(self._trained, [None] * len(self._trained))
            self._update = self._program(
                steps.update_by_joined, replace(tensors, buffers=[], held=joined, batch=[])
            )
        else:
            self._fixed = [*tensors.parameters, *tensors.buffers, *moved]
            self._run = self._program(steps.whole, tensors)
        self._has_norm, self._kept = steps.has_norm, steps.kept

    def _program(
        self, function: Callable[[GraphInputs], list[Tensor]], tensors: GraphInputs
    ) -> Program:
        flat = tensors.flat()
        program = self._compiler(trace(function, tensors), flat)
        if not flat[0].is_cuda:
            return program
        num_held = len(tensors.held)
        warm_up(program, flat)
        pool = next((graph.pool for graph in self._graphs), None)
        num_given = num_held + len(tensors.batch)
        graph = CudaGraph(program, flat, num_given=num_given, changed=num_held, pool=pool)
        self._graphs.add(graph)
        return graph

    def fits(self, plan: GradientPlan, batch: Any) -> bool:
        """Return whether this variant computes what the usual step would compute now."""
        return (
            plan == self._plan
            and self._contract.holds(batch)
            and (not self._addresses or self._located() == self._addresses)
        )

    def _located(self) -> list[int]:
        """Return the addresses of tensors that a CUDA graph uses; none without a CUDA graph."""
        is_graph = isinstance(self._run, CudaGraph)
        return [tensor.data_ptr() for tensor in self._fixed] if is_graph else []

    def is_outdated(self, plan: GradientPlan, batch: Any) -> bool:
        """Return whether a variant that does not fit was invalidated by a change after few uses."""
        if self._uses >= _FEW_USES or plan != self._plan:
            return False
        return _kind(batch) == self._kind and self._contract.has_order(batch)

    def repeats(self, optim_wrapper: Any) -> bool:
        """Return whether the next step has the same plan."""
        return optim_wrapper.accumulative_counts == 1 and not self._plan.held

    def expect_change(self) -> None:
        """Verify the next step, in case the model has changed, unless one was verified recently."""
        self._verifier.expect_change(self._uses)

    def run_unchecked(self, batch: Any, optim_wrapper: Any) -> dict[str, Any] | None:
        """Run one step without checking the model; return the values to log.

        If the plan may differ, if settings or the kind of batch have changed, or if a verification
        is due, no step is run and None is returned.
        """
        if (
            not self._verifier.is_due(self._uses + 1)
            and self._kind is not None
            and _kind(batch) == self._kind
            and self._contract.settings_hold()
            and self.repeats(optim_wrapper)
        ):
            if optim_wrapper.loss_weight is not None:
                optim_wrapper.weigh(batch)
            if self._plan.ranks > 1:
                broadcast_from_first_rank(self._shared, self._group)
            return self.run(batch, optim_wrapper)
        return None

    def run(self, batch: Any, optim_wrapper: Any) -> dict[str, Any]:
        """Run one step and return the values to log.

        Every rank that averages its gradients must call this.

        Raises:
            NotCompilableError: the result differs from the usual step's; model and optimizer are
                unchanged.
            StepMismatchError: the result differs, and earlier steps may have been wrong.
        """
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.set(group["lr"])
        self._uses += 1
        is_due = self._verifier.is_due(self._uses)
        window, plan = optim_wrapper.window, self._plan
        inputs = [*self._fixed, *(self._kept_gradients() if plan.held else ()), *self._pick(batch)]
        before = window.weight, window.total
        self._loss_factor.set(window.loss_factor())
        # With a separate update program, the loss weight is added and sent only after the forward
        # has been verified, in `_average_and_update`.
        if self._update is None:
            window.add_weight()
            if plan.updates:
                self._gradient_factor.set(window.gradient_factor())
        try:
            outputs = self._run(inputs) if not is_due else self._verified_step(inputs, batch)
        except NotCompilableError:
            window.weight, window.total = before
            raise
        optim_wrapper.count_micro_batch()
        count = len(self._names)
        if plan.updates:
            if self._update is not None:
                outputs[count:] = self._average_and_update(outputs[count:], window, is_due)
            if self._has_norm:
                optim_wrapper.grad_norm = outputs[count]
            if plan.held:
                optim_wrapper.zero_grad()
        else:
            for at, gradient in zip(self._kept, outputs[count:], strict=True):
                self._trained[at].grad = gradient
        logs = dict(zip(self._names, outputs, strict=False))
        return {**logs, **self._constants} if self._constants else logs

    def _average_and_update(self, joined: list[Tensor], window: Any, is_due: bool) -> list[Tensor]:
        """Sum the gradients over the ranks and update; return a list with their norm, or []."""
        assert self._update is not None
        window.add_weight()
        window.start_reduction()
        _sum_over_ranks(joined, self._group)
        self._gradient_factor.set(window.gradient_factor())
        if not is_due:
            return self._update([*self._moved, *joined])
        # Copies, because clipping changes the gradients in place.
        copies = [tensor.clone() for tensor in joined]
        try:
            return self._verified_update(joined, copies)
        except NotCompilableError as reason:
            # The other ranks have already run this step, so run it in eager mode.
            self.failure = reason
            norm = update(self._places, self._clip, self._gradient_factor.tensor, copies)
            self._optimizer.zero_grad()
            return [] if norm is None else [norm]

    def _kept_gradients(self) -> list[Tensor]:
        pairs = zip(self._trained, self._plan.held, strict=True) if self._plan.held else ()
        return [param.grad for param, is_held in pairs if is_held and param.grad is not None]

    def _verified_step(self, inputs: list[Tensor], batch: Any) -> list[Tensor]:
        loss_factor, gradient_factor = self._loss_factor.value, self._gradient_factor.value
        plan = self._plan
        count, is_whole = len(self._names), self._update is None
        # A copy, because a forward may change its batch in place.
        before = clone_batch(batch)

        def usual(origin: Any, **options: Any) -> dict[str, dict[str, Tensor]]:
            step = EagerStep(origin, clone_batch(before), **options)
            values = {"logs": step.backward(plan, loss_factor)}
            if not is_whole:
                values["gradients"] = dict(enumerate(step.parts(plan)))  # type: ignore[arg-type]
            elif not plan.updates:
                values["gradients"] = step.gradients()
            else:
                norm = update(step.places, self._clip, gradient_factor)
                values["norm"] = {} if norm is None else {_NORM: norm}
            return {**values, **changed_values(step.places)}

        def program_values(outputs: list[Tensor]) -> dict[str, dict[str, Tensor]]:
            values = {"logs": dict(zip(self._names, outputs, strict=False))}
            remaining = outputs[count:]
            if not is_whole:
                values["gradients"] = dict(enumerate(remaining))  # type: ignore[arg-type]
            elif plan.updates:
                values["norm"] = dict(zip([_NORM], remaining, strict=False))
            else:
                new_grads = dict(
                    zip((self._trained[at] for at in self._kept), remaining, strict=True)
                )
                named_params = zip(self._places.names, self._places.parameters, strict=False)
                grads = ((name, new_grads.get(param, param.grad)) for name, param in named_params)
                values["gradients"] = {name: grad for name, grad in grads if grad is not None}
            return {**values, **changed_values(self._places)}

        try:
            return self._verifier.run(self._uses, partial(self._run, inputs), program_values, usual)
        except NotCompilableError:
            for (_, tensor), (_, was) in zip(tensors_in(batch), tensors_in(before), strict=True):
                tensor.copy_(was)
            raise

    def _verified_update(self, joined: list[Tensor], copies: list[Tensor]) -> list[Tensor]:
        assert self._update is not None

        def usual(origin: Any, **options: Any) -> dict[str, dict[str, Tensor]]:
            step = EagerStep(origin, None, **options)
            norm = update(step.places, self._clip, self._gradient_factor.value, copies)
            values = {} if norm is None else {_NORM: norm}
            return {"norm": values, **changed_values(step.places)}

        def program_values(outputs: list[Tensor]) -> dict[str, dict[str, Tensor]]:
            values = dict(zip([_NORM], outputs, strict=False))
            return {"norm": values, **changed_values(self._places)}

        program = partial(self._update, [*self._moved, *joined])
        return self._verifier.run(self._uses, program, program_values, usual)


def _forward(
    captured: Captured, step_tensors: StepTensors
) -> Callable[[GraphInputs], tuple[Tensor, list[Tensor]]]:
    """Return the captured losses as a function of the tensors of a step."""
    batch = iter(range(len(step_tensors.names), len(step_tensors.names) + len(captured.reads)))
    reads = [
        step_tensors.index[where] if kind == "model" else next(batch)
        for kind, where in captured.reads
    ]
    graph = _Interpreter(captured.graph)

    def forward(graph_inputs: GraphInputs) -> tuple[Tensor, list[Tensor]]:
        available = [*graph_inputs.parameters, *graph_inputs.buffers, *graph_inputs.batch]
        outputs = graph.run(*(available[at] for at in reads))
        return outputs[captured.total], [outputs[at] for at in captured.logs.values()]

    return forward


class _Interpreter(Interpreter):
    """Run a graph, but keep the activations of checkpointed blocks instead of recomputing them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the graph."""
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Interpreter(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)


def update_like_programs(total: Tensor, optim_wrapper: Any, wrapper: Any) -> None:
    """Run an eager update that averages the gradients in joined tensors, as programs do.

    This is necessary because other ranks may run a program for their batches.
    """
    optim_wrapper.backward(optim_wrapper.scale_loss(total))
    if optim_wrapper.should_update():
        _average(get_parameters(optim_wrapper.optimizer), wrapper.data_group)
        unreduced.pop(wrapper, None)
        optim_wrapper.step()
        optim_wrapper.zero_grad()


def shared_buffers(wrapper: Any) -> list[Tensor]:
    """Return the buffers that DDP broadcasts before the first forward of a window."""
    # Newer versions of torch have renamed the attribute and warn about the old name.
    newer = hasattr(wrapper, "forward_sync_buffers")
    shares = wrapper.forward_sync_buffers if newer else wrapper.broadcast_buffers
    return list(wrapper.module.buffers()) if shares else []


def _average(parameters: Iterable[Tensor], group: Any) -> None:
    trained = [param for param in parameters if param.requires_grad]
    joined = join_gradients(trained, [param.grad for param in trained])
    for tensor in joined:
        tensor /= distributed.get_world_size(group)
    _sum_over_ranks(joined, group)
    for param, gradient in zip(trained, split_joined(trained, joined), strict=True):
        param.grad = gradient


def _sum_over_ranks(tensors: Iterable[Tensor], group: Any) -> None:
    """Sum tensors over the ranks in place; all reductions run at the same time."""
    works = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


@contextmanager
def _state_on(
    device: torch.device, step_tensors: StepTensors
) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Move the optimizer's state, such as step counts on the CPU, to ``device``.

    After an error in this context it is moved back. The context gives each dict of the state with
    the name of a tensor that was moved from the CPU.
    """
    before = [(state, name, state[name]) for _, name, state in step_tensors.states()]
    try:
        for state, name, value in before:
            state[name] = value.to(device)
        is_moved = device.type != "cpu"
        yield [(state, name) for state, name, value in before if is_moved and value.is_cpu]
    except BaseException:
        for state, name, value in before:
            state[name] = value
        raise


class _Number:
    """A number that a program reads from a tensor."""

    def __init__(self, value: Any, device: torch.device) -> None:
        self._value: float | None = float(value)
        self.tensor = torch.tensor(float(value), dtype=torch.float64, device=device)

    @property
    def value(self) -> float:
        """The number; reading it from a GPU waits for the GPU."""
        return self.tensor.item()

    def set(self, value: Any) -> None:
        """Set the number; if ``value`` is a tensor on a GPU, do not wait for the GPU."""
        if isinstance(value, Tensor) and value.is_cuda:
            self.tensor.copy_(value)
            self._value = None
        elif (number := float(value)) != self._value:
            self._value = number
            self.tensor.fill_(number)


def _kind(batch: Any) -> Any:
    """Return keys, shapes, strides, types and devices of a flat batch of tensors.

    Returns None for other batches, for which the whole contract must be checked.
    """
    keys: Any
    if type(batch) is dict:
        keys, tensors = tuple(batch), [*batch.values()]
    elif type(batch) in (list, tuple):
        keys, tensors = len(batch), batch
    else:
        return None
    if any(type(tensor) is not Tensor or tensor.is_complex() for tensor in tensors):
        return None
    if len({*map(id, tensors)}) < len(tensors):
        return None
    return keys, [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        for tensor in tensors
    ]
