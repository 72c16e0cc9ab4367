"""One compiled step, and all that it takes for granted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..sharding.layout import parameters_of
from ..sharding.mesh import broadcast_first
from ..steps.preprocess import device_of
from ..steps.step import as_call, parse_losses
from .cuda_graph import CudaGraph, warm_up
from .program import Program, compile_graph
from .trace import (
    NotCompilableError,
    Places,
    Plan,
    StepFunctions,
    Tensors,
    joined,
    taken_apart,
    trace,
)

# How far the compiled step may be from the same one in eager mode, as a part of what it changes.
# Sums in another order are the reason, and Adam, which takes little more than signs at first.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 0.02}
_OF_HALF = 0.2
# A program that serves for fewer steps was not worth compiling.
_FEW = 3
# A tensor among the leaves of a batch.
_HERE = "a tensor"


class Compiled:
    """A step for one plan, one kind of batch, and one state of model and optimizer.

    Args:
        batch: the tensors of a batch, and ``structure``: the rest of it, as by ``flattened``.

    Raises:
        NotCompilableError: the step cannot be compiled.
    """

    def __init__(
        self, wrapper: Any, optim_wrapper: Any, plan: Plan, batch: list[Tensor], structure: Any
    ) -> None:
        model: Any = wrapper.module
        self._plan, self._structure, self._kinds = plan, structure, _kinds(batch)
        self._group = wrapper.data_group
        places = Places(model, optim_wrapper.optimizer)
        self._trained = places.trained_tensors()
        with _state_on(device_of(model), places):
            self._make(wrapper, optim_wrapper, places, batch)
        self._addresses = self._located()

    def _make(self, wrapper: Any, optim_wrapper: Any, places: Places, batch: list[Tensor]) -> None:
        plan, structure, model = self._plan, self._structure, wrapper.module
        device = device_of(model)
        self._assumptions = Assumptions(model, optim_wrapper.optimizer)
        # A rate may be a tensor that changes in place.
        groups = optim_wrapper.optimizer.param_groups
        self._rates = [_Number(one["lr"], device) for one in groups]
        self._share, self._factor = _Number(1.0, device), _Number(1.0, device)

        def losses(tensors: Sequence[Tensor]) -> Any:
            args, kwargs = as_call(unflattened(tensors, structure))
            return model(*args, **kwargs, mode="loss")

        parse = getattr(model, "parse_losses", parse_losses)
        steps = StepFunctions(places, plan, losses, parse, optim_wrapper._clip)
        fixed, count = places.tensors(), len(places.parameters)
        tensors = Tensors(
            fixed[:count],
            fixed[count:],
            [state[name] for _, name, state in places.states()],
            [one.tensor for one in self._rates],
            [self._share.tensor, self._factor.tensor] if optim_wrapper.loss_weight else [],
            self._held(),
            batch,
        )
        if len(devices := {str(one.device) for one in tensors.flat()}) > 1:
            raise NotCompilableError(f"there are tensors on {' and on '.join(sorted(devices))}")
        shares = plan.ranks > 1 and not plan.held
        self._shared = shared_buffers(wrapper) if shares else []
        self._update: Program | None = None
        self._runs = 0
        with _undone(model):
            self._make_programs(steps, tensors)
            if (changed := self._assumptions.changed()) is not None:
                raise NotCompilableError(f"its forward changes {changed}")
        self._names = [name for name, constant in steps.logs if constant is None]
        self._constants = {name: value for name, value in steps.logs if value is not None}
        self._has_norm, self._kept = steps.has_norm, steps.kept

    def _make_programs(self, steps: StepFunctions, tensors: Tensors) -> None:
        moved = [*tensors.states, *tensors.rates, *tensors.weights]
        if not (self._plan.updates and self._plan.ranks > 1):
            self._fixed = [*tensors.parameters, *tensors.buffers, *moved]
            self._run = _program(steps.whole, tensors)
            return
        self._fixed = [*tensors.parameters, *tensors.buffers, *tensors.weights]
        self._run = _program(steps.joined_gradients, replace(tensors, states=[], rates=[]))
        self._moved = [*tensors.parameters, *moved]
        parts = joined(self._trained, [None] * len(self._trained))
        self._update = _program(
            steps.update_by_joined, replace(tensors, buffers=[], held=parts, batch=[])
        )

    def fits(self, plan: Plan, batch: Sequence[Tensor], structure: Any) -> bool:
        """Whether it does what the usual step would do now."""
        return (
            plan == self._plan
            and structure == self._structure
            and _kinds(batch) == self._kinds
            and self._assumptions.changed() is None
            and self._located() == self._addresses
        )

    def _located(self) -> list[int]:
        """Where the tensors lie that a CUDA graph finds by their addresses."""
        is_graph = isinstance(self._run, CudaGraph)
        return [one.data_ptr() for one in self._fixed] if is_graph else []

    def is_outdated(self) -> bool:
        """Whether the optimizer's settings have changed right after it was made."""
        return self._runs < _FEW and not self._assumptions.settings_hold()

    def repeats(self, optim_wrapper: Any) -> bool:
        """Whether the next step has the same plan."""
        return optim_wrapper._accumulative_counts == 1 and not self._plan.held

    def again(self, batch: Any, optim_wrapper: Any) -> dict[str, Any] | None:
        """Step where only the optimizer's settings may have changed; None: nothing was done."""
        tensors, structure = flattened(batch)
        if (
            structure == self._structure
            and _kinds(tensors) == self._kinds
            and self._assumptions.settings_hold()
        ):
            if optim_wrapper.loss_weight is not None:
                optim_wrapper.weigh(batch)
            return self.run(tensors, optim_wrapper)
        return None

    def run(self, batch: list[Tensor], optim_wrapper: Any) -> dict[str, Any]:
        """Step, and return the logs; every rank that averages its gradients must call this."""
        for rate, group in zip(self._rates, optim_wrapper.optimizer.param_groups, strict=True):
            rate.set(group["lr"])
        if self._shared:
            broadcast_first(self._shared, self._group)
        window = optim_wrapper._window
        if window is not None:
            self._begin(window)
        held = self._held() if self._plan.held else ()
        outputs = self._run([*self._fixed, *held, *batch])
        optim_wrapper._inner_count += 1
        self._runs += 1
        if self._plan.updates:
            if self._update is not None:
                parts = outputs[len(self._names) :]
                _add_up(parts, self._group)
                if window is not None:
                    self._factor.set(window.factor())
                outputs[len(self._names) :] = self._update([*self._moved, *parts])
            if self._has_norm:
                optim_wrapper.grad_norm = outputs[len(self._names)]
            if self._plan.held:
                optim_wrapper.zero_grad()
        else:
            for at, gradient in zip(self._kept, outputs[len(self._names) :], strict=True):
                self._trained[at].grad = gradient
        logs = dict(zip(self._names, outputs, strict=False))
        return {**logs, **self._constants} if self._constants else logs

    def _begin(self, window: Any) -> None:
        """Count the weight of the micro-batch, as ``OptimWrapper.backward`` does."""
        self._share.set(window.share())
        window.take()
        if self._update is not None:
            window.send()
        elif self._plan.updates:
            self._factor.set(window.factor())

    def _held(self) -> list[Tensor]:
        pairs = zip(self._trained, self._plan.held, strict=True) if self._plan.held else ()
        return [one.grad for one, is_held in pairs if is_held and one.grad is not None]


def step_in_eager_mode(wrapper: Any, batch: Any, optim_wrapper: Any, plan: Plan) -> dict[str, Any]:
    """Step as usual, but average the gradients as a program does: in joined tensors."""
    model = wrapper.module
    if not plan.held:
        broadcast_first(shared_buffers(wrapper), wrapper.data_group)
    args, kwargs = as_call(batch)
    losses = model(*args, **kwargs, mode="loss")
    with torch.autocast(device_of(model).type, enabled=False):
        total, logs = getattr(model, "parse_losses", parse_losses)(losses)
        optim_wrapper.backward(optim_wrapper.scale_loss(total))
        if optim_wrapper.should_update():
            _average(parameters_of(optim_wrapper.optimizer), wrapper.data_group)
            optim_wrapper.step()
            optim_wrapper.zero_grad()
    return {name: v.detach() if isinstance(v, Tensor) else v for name, v in logs.items()}


def shared_buffers(wrapper: Any) -> list[Tensor]:
    """What DistributedDataParallel gives to all ranks before the first forward of a window."""
    # Under its older name in older versions of torch, and the newer ones warn of that.
    newer = hasattr(wrapper, "forward_sync_buffers")
    shares = wrapper.forward_sync_buffers if newer else wrapper.broadcast_buffers
    return list(wrapper.module.buffers()) if shares else []


def _average(parameters: Iterable[Tensor], group: Any) -> None:
    wanted = [one for one in parameters if one.requires_grad]
    parts = joined(wanted, [one.grad for one in wanted])
    for part in parts:
        part /= distributed.get_world_size(group)
    _add_up(parts, group)
    for one, gradient in zip(wanted, taken_apart(wanted, parts), strict=True):
        one.grad = gradient


def _add_up(parts: Iterable[Tensor], group: Any) -> None:
    """Add up over the ranks, all at once."""
    works = [distributed.all_reduce(one, group=group, async_op=True) for one in parts]
    for work in works:
        work.wait()


class Assumptions:
    """What a program has read of a model and an optimizer that is no input of it.

    The attributes of the modules, except for those that the batch is prepared by; which tensors
    are parameters, buffers and state; which parameters get gradients; and the settings of the
    optimizer, except for its learning rates. Changes inside objects, and what a forward reads
    elsewhere, are not seen.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        preparing: Any = getattr(model, "data_preprocessor", None)
        left_out = {id(one) for one in preparing.modules()} if preparing is not None else set()
        modules = [(n, one) for n, one in model.named_modules() if id(one) not in left_out]
        live = [(f"an attribute of {name or 'the model'}", vars(one)) for name, one in modules]
        live += [("the state of the optimizer", one) for one in optimizer.state.values()]
        self._known = [(one, _snapshot(one), told) for told, one in live]
        self._parameters = list(model.parameters())
        self._flags = _flags(self._parameters)
        self._optimizer: Any = optimizer
        self._parts = optimizer.state, optimizer.param_groups
        self._groups = [{**one} for one in optimizer.param_groups]

    def changed(self) -> str | None:
        """What is not as it was; None where all is."""
        optimizer = self._optimizer
        if optimizer.state is not self._parts[0] or optimizer.param_groups is not self._parts[1]:
            return "the state of the optimizer"
        told = "the settings of the optimizer"
        try:
            if not self.settings_hold():
                return told
            for live, known, told in self._known:
                if live != known:
                    return told
        except (RuntimeError, ValueError):
            # Two tensors or arrays that are not the same one.
            return told
        if _flags(self._parameters) != self._flags:
            return "which parameters get gradients"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "the hooks of the optimizer"
        return None

    def settings_hold(self) -> bool:
        """Whether the optimizer's settings, but for learning rates, are as they were."""
        groups = self._optimizer.param_groups
        if groups != self._groups:
            for known, group in zip(self._groups, groups, strict=False):
                known["lr"] = group["lr"]
            return bool(groups == self._groups)
        return True


def _flags(parameters: Iterable[Tensor]) -> list[tuple[bool, Any]]:
    return [(one.requires_grad, one._backward_hooks) for one in parameters]


def _snapshot(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of the attributes, and of the lists, sets and dicts among them."""
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        # Not an OrderedDict, which compares more slowly.
        kept[name] = dict(value) if isinstance(value, dict) else value
        if isinstance(value, (list, set)):
            kept[name] = copy.copy(value)
    return kept


@contextmanager
def _state_on(device: torch.device, places: Places) -> Iterator[None]:
    """Move what an optimizer keeps on the CPU, as counts of steps: a graph could not change it."""
    before = [(state, name, state[name]) for _, name, state in places.states()]
    try:
        for state, name, one in before:
            state[name] = one.to(device)
        yield
    except BaseException:
        for state, name, one in before:
            state[name] = one
        raise


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Take attributes of the modules, and tensors in them, back to what they were before."""
    modules = [(vars(one), dict(vars(one))) for one in model.modules()]
    values = [value for _, known in modules for value in known.values()]
    contents = [(one, copy.copy(one)) for one in values if isinstance(one, (dict, list, set))]
    plain = [(one, one.detach().clone()) for one in values if isinstance(one, Tensor)]
    try:
        yield
    finally:
        for live, known in modules:
            live.clear()
            live.update(known)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        with torch.no_grad():
            for one, value in plain:
                one.copy_(value)


class _Number:
    """A number as a tensor."""

    def __init__(self, value: Any, device: torch.device) -> None:
        self._value: float | None = float(value)
        self.tensor = torch.tensor(float(value), dtype=torch.float64, device=device)

    def set(self, value: Any) -> None:
        """Take over another value."""
        if isinstance(value, Tensor) and value.is_cuda:
            # Without waiting for it.
            self.tensor.copy_(value)
            self._value = None
        elif (number := float(value)) != self._value:
            self._value = number
            self.tensor.fill_(number)


def flattened(batch: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a preprocessed batch, and all the rest of it, to be compared by ``==``.

    Raises:
        NotCompilableError: there is a tensor of another class, or with a gradient, in it.
    """
    structure: Any = None
    leaves: list[Any] = [None]
    if type(batch) in (list, tuple):
        leaves, structure = [*batch], len(batch)
    elif type(batch) is dict:
        leaves, structure = list(batch.values()), tuple(batch)
    is_flat = True
    for one in leaves:
        is_flat = is_flat and type(one) is Tensor and not one.requires_grad
    if not is_flat:
        leaves, spec = tree_flatten(batch)
        structure = spec, [_HERE if isinstance(one, Tensor) else one for one in leaves]
        leaves = [one for one in leaves if isinstance(one, Tensor)]
        if any(type(one) is not Tensor or one.requires_grad for one in leaves):
            raise NotCompilableError("the batch has tensors of another class, or with gradients")
    return [one if one.is_contiguous() else one.contiguous() for one in leaves], structure


def unflattened(tensors: Sequence[Tensor], structure: Any) -> Any:
    """The batch again."""
    if isinstance(structure, int):
        return [*tensors]
    if isinstance(structure[0], str):
        return dict(zip(structure, tensors, strict=True))
    spec, leaves = structure
    rest = iter(tensors)
    return tree_unflatten([next(rest) if one is _HERE else one for one in leaves], spec)


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    return [(one.shape, one.dtype, one.device) for one in tensors]


def _program(function: Callable[[Tensors], list[Tensor]], tensors: Tensors) -> Program:
    """Compile a function of tensors, and compare it once with the function itself."""
    flat = tensors.flat()
    program = compile_graph(trace(function, tensors), flat)
    before = [one.detach().clone() for one in flat]
    mine, theirs = ([one.clone() for one in before] for _ in range(2))
    gpus = [flat[0].device] if flat[0].is_cuda else []
    if gpus:
        warm_up(program, mine)
    with torch.random.fork_rng(gpus):
        made = _launched(program, tensors.cut(mine))(mine)
        streams = _random_states(gpus)
    with torch.random.fork_rng(gpus):
        expected = function(tensors.cut(theirs))
        if not all(map(torch.equal, streams, _random_states(gpus))):
            raise NotCompilableError("compiled, it draws other random numbers")
    # Each kind as a whole: where a gradient is zero but for rounding, Adam's step is anything.
    kinds = [*tensors.lengths(), len(expected)]
    news, wanteds = ([*new, *out] for new, out in ((mine, made), (theirs, expected)))
    starts = [*before, *(torch.zeros_like(one) for one in expected)]
    rest = zip(news, wanteds, starts, strict=True)
    for count in kinds:
        if _differ([next(rest) for _ in range(count)]):
            raise NotCompilableError("compiled, it gives other numbers")
    return _launched(program, tensors)


def _launched(program: Program, tensors: Tensors) -> Program:
    """The program for these tensors: on a GPU, as a CUDA graph."""
    flat, held = tensors.flat(), len(tensors.held)
    if not flat[0].is_cuda:
        return program
    return CudaGraph(program, flat, given=held + len(tensors.batch), changed=held)


def _random_states(gpus: Sequence[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in gpus)]


def _differ(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> bool:
    """Whether new tensors are not what is wanted, measured by the way from the start to there."""
    off = way = size = torch.zeros((), dtype=torch.float64)
    tolerance = 0.0
    for new, wanted, start in triples:
        if not new.is_floating_point():
            if not torch.equal(new, wanted):
                return True
            continue
        finite = wanted.isfinite()
        if not torch.equal(finite, new.isfinite()):
            return True
        tolerance = max(tolerance, _TOLERANCES.get(new.dtype, _OF_HALF))
        new, wanted, start = (one.double()[finite] for one in (new, wanted, start))
        off, way = off + (new - wanted).square().sum(), way + (wanted - start).square().sum()
        size = size + wanted.square().sum()
    return bool(off.sqrt() > tolerance * way.sqrt() + 1e-6 * size.sqrt() + 1e-30)
