"""Construct models without allocating parameters, and initialise them shard by shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout import broadcast_from_first_rank, copy_whole_

Initialiser: TypeAlias = Callable[[nn.Module], Any]
_Slot: TypeAlias = tuple[nn.Module, str]


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Construct modules in this context with their parameters on the meta device.

    The parameters have shapes but no memory; buffers are real, because they cannot be computed
    again later. Constructors draw no random numbers; a wrapper that is constructed next draws them,
    so with the same seed the weights are the same as without this context. The context affects all
    threads. Weights that a constructor sets outside of ``reset_parameters`` are lost.
    """
    handle = register_module_parameter_registration_hook(_move_to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def check_no_meta_buffers(model: nn.Module) -> None:
    """Raise ValueError if a buffer is on the meta device."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffers must have values, but {name} is on the meta device: construct the model "
                "inside stepwrap.wrappers.meta_parameters(), which keeps buffers real, instead of "
                'torch.device("meta")'
            )


def materialise(model: nn.Module, mesh: DeviceMesh, init: Initialiser | None = None) -> None:
    """Allocate and initialise parameters on the meta device; every rank must call this.

    Call it after ``fully_shard``. It needs memory for the shards, and for the whole parameters that
    one module's ``reset_parameters`` writes. Modules are initialised in the order in which
    constructors usually do it, children first; a tied parameter is initialised by the first module
    that has it.

    All ranks use the random state of the mesh's first rank. A rank whose state differed gets its
    previous state back.

    Args:
        model: the sharded model.
        mesh: all ranks that hold parts of the model.
        init: called with every module that has parameters on the meta device; default: call the
            module's ``reset_parameters``, or ``_reset_parameters`` (``nn.MultiheadAttention``).

    Raises:
        ValueError: a parameter was not written by any initialiser.
    """
    jobs, device = _find_jobs(model, init), torch.device(mesh.device_type)
    # Not `to_empty`, which would replace the buffers too.
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    with _random_state_of_first(mesh, device):
        _Builder(model, jobs, device).run()


class _Job(NamedTuple):
    """One module to initialise, and the parameters that its initialiser may write."""

    module: nn.Module
    init: Callable[[], Any] | None
    slots: list[_Slot]


class _Builder:
    """Initialise modules one by one; keep whole parameters only while they are needed."""

    def __init__(self, model: nn.Module, jobs: Sequence[_Job], device: torch.device) -> None:
        self._names = {p: name for name, p in model.named_parameters()}
        self._jobs = jobs
        self._device = device
        # Keyed by shard, because tied parameters have several slots.
        self._whole: dict[nn.Parameter, nn.Parameter] = {}
        self._written: set[nn.Parameter] = set()
        self._owners: dict[nn.Parameter, nn.Module] = {}
        for job in jobs:
            for slot in job.slots:
                if slot[0] is job.module and job.init is not None:
                    self._owners.setdefault(_parameter_in(slot), job.module)
        self._last = {
            _parameter_in(slot): at
            for at, job in enumerate(jobs)
            for slot in job.slots
            if not self._is_tied_copy(job, slot)
        }

    def run(self) -> None:
        for at, job in enumerate(self._jobs):
            shards = {slot: _parameter_in(slot) for slot in job.slots}
            try:
                self._fill(job, shards)
            finally:
                for (owner, name), shard in shards.items():
                    owner._parameters[name] = shard
            for shard in dict.fromkeys(shards.values()):
                if self._last[shard] == at:
                    self._store(shard)

    def _fill(self, job: _Job, shards: Mapping[_Slot, nn.Parameter]) -> None:
        created: dict[_Slot, nn.Parameter] = {}
        for slot, shard in shards.items():
            is_used = not self._is_tied_copy(job, slot)
            full = self._whole.get(shard) if is_used else None
            if full is None:
                memory = torch.empty(shard.shape, dtype=shard.dtype, device=self._device)
                full = nn.Parameter(memory, shard.requires_grad)
            if is_used:
                created[slot] = self._whole[shard] = full
            slot[0]._parameters[slot[1]] = full
        with _Writes() as writes, torch.no_grad():
            if job.init is not None:
                job.init()
        for slot, full in created.items():
            now = _parameter_in(slot)
            if now is not full or writes.contains(now):
                self._whole[shards[slot]] = now
                self._written.add(shards[slot])

    def _is_tied_copy(self, job: _Job, slot: _Slot) -> bool:
        """Return whether to discard the values of ``slot``: another module initialises them."""
        return slot[0] is job.module is not self._owners.get(_parameter_in(slot), job.module)

    def _store(self, shard: nn.Parameter) -> None:
        full = self._whole.pop(shard)
        if shard not in self._written:
            raise ValueError(
                "every parameter on the meta device must be initialised, but nothing initialises "
                f"{self._names[shard]}: initialise it in reset_parameters() of its module, or pass "
                "param_init_fn(module) to the wrapper"
            )
        copy_whole_(shard, full)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the memory that operations write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[at] if at < len(args) else named.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        # The reference prevents another tensor from reusing the memory.
                        self._seen[tensor.untyped_storage()._cdata] = tensor
        return func(*args, **named)

    def contains(self, tensor: Tensor) -> bool:
        """Return whether an operation has written the memory of ``tensor``."""
        return tensor.untyped_storage()._cdata in self._seen


def _parameter_in(slot: _Slot) -> nn.Parameter:
    param = slot[0]._parameters[slot[1]]
    assert param is not None
    return param


def _find_jobs(model: nn.Module, init: Initialiser | None) -> list[_Job]:
    """Return the modules to initialise, in order, with the parameters that each one writes."""
    jobs = []
    for module in _children_first(model, set()):
        slots: list[_Slot] = [(module, name) for name, _ in _meta_parameters(module)]
        start: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if init is not None:
            start = functools.partial(_call, init, module)
        elif start is not None:
            slots += [slot for slot in _dry_run(module, start) if slot not in slots]
        if slots:
            jobs.append(_Job(module, start, slots))
    return jobs


def _call(init: Initialiser, module: nn.Module) -> None:
    # Functions for FSDP1 call `to_empty` first. It does nothing here, because the memory is
    # allocated already.
    vars(module)["to_empty"] = lambda **_: module
    try:
        init(module)
    finally:
        del vars(module)["to_empty"]


def _children_first(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in visited:
        visited.add(module)
        for child in module.children():
            yield from _children_first(child, visited)
        yield module


def _meta_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, param) for name, param in named if param.is_meta]


def _dry_run(module: nn.Module, init: Callable[[], Any]) -> list[_Slot]:
    """Run ``init`` on the meta device, which is cheap; return the parameters that it writes."""
    slots = {
        (module, name): p for module in module.modules() for name, p in _meta_parameters(module)
    }
    if all(owner is module for owner, _ in slots):
        return []
    state = torch.get_rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    stand_ins = {
        p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for p in slots.values()
    }
    try:
        for (owner, name), p in slots.items():
            owner._parameters[name] = stand_ins[p]
        with _Writes() as writes, torch.no_grad():
            init()
        return [
            slot
            for slot, p in slots.items()
            if _parameter_in(slot) is not stand_ins[p] or writes.contains(stand_ins[p])
        ]
    except (RuntimeError, NotImplementedError):
        # ``init`` reads values, which do not exist on the meta device. Assume that it writes all
        # parameters.
        return list(slots)
    finally:
        for (owner, name), p in slots.items():
            owner._parameters[name] = p
        for buffer, values in buffers:
            buffer.copy_(values)
        torch.set_rng_state(state)


def _move_to_meta(
    module: nn.Module, name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta or is_lazy(parameter):
        return None
    twin: nn.Parameter | None = parameter.__dict__.get("_on_meta")
    if twin is None:
        twin = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        # Kept for the case that another module registers the same parameter.
        parameter._on_meta = twin  # type: ignore[attr-defined]
    return twin


@contextmanager
def _random_state_of_first(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    kinds: list[Any] = [torch.random]
    if device.type != "cpu":
        kinds.append(torch.get_device_module(device))
    states = [kind.get_rng_state() for kind in kinds]
    rank_0_states = [state.clone() for state in states]
    if distributed.is_initialized():
        broadcast_from_first_rank(rank_0_states, mesh)
    for kind, state in zip(kinds, rank_0_states, strict=True):
        kind.set_rng_state(state)
    try:
        yield
    finally:
        for kind, before, state in zip(kinds, states, rank_0_states, strict=True):
            if not torch.equal(before, state):
                kind.set_rng_state(before)
