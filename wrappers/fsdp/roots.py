"""The root modules of a sharded model: when they gather and free parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..layout import fsdp_roots, unreduced
from ..steps.buffers import count_changes
from ..torch_functions import refuse_double_backward, uncompiled
from .torch_internals import (
    call_as_forward,
    check_torch,
    drop_gradients,
    get_groups,
    get_unsharded,
    init_dtypes,
    is_interrupted,
    is_running,
    local_shards,
    reset,
    use_local_shard,
    whole_flags,
)


class Root:
    """An outermost module that ``fully_shard`` was applied to, with the units inside it.

    It also keeps ``requires_grad`` of each shard and of the gathered whole parameter equal. FSDP2
    copies the flag from the shard when it gathers. Later changes of the shard's flag would have no
    effect while the parameter is gathered, and changes of the whole parameter's flag would be lost
    when it is freed.

    Attributes:
        module: the root module.
        may_call_children: whether the model's step may call its children directly.
        units: the modules that are gathered separately, the root first.
    """

    def __init__(self, module: nn.Module, *, may_call_children: bool) -> None:
        self._versions: list[tuple[Any, int]] = []
        self.module: Any = module
        self.may_call_children = may_call_children
        self.units = [child for child in module.modules() if isinstance(child, FSDPModule)]
        for unit in self.units:
            check_torch(unit)
            unit.register_forward_hook(_refuse_double_backward)
        self._groups = [group for unit in self.units for group in get_groups(unit)]
        self._params = [fsdp_param for group in self._groups for fsdp_param in group.fsdp_params]
        self._known = _shard_flags(self._params)
        self._shards = local_shards(self._params)
        # Whether `no_sync` is active, and whether FSDP2 has already been set accordingly.
        self._skips_sync = self._module_skips_sync = False
        self._gathered_once = False
        # Numbers of active `is_in_use` contexts and of active forwards.
        self._num_uses = self._depth = 0
        fsdp_roots.add(self)
        # Must run before torch's hook, which gathers the parameters.
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce the gradients of forwards in this context over the ranks."""
        before, self._skips_sync = self._skips_sync, True
        try:
            yield
        finally:
            self._skips_sync = before

    @contextmanager
    def is_in_use(self, *, gather: bool) -> Iterator[None]:
        """Allow code in this context to use parameters outside of a forward.

        Args:
            gather: whether to gather all parameters of the root first.
        """
        self._prepare()
        if gather:
            self.module.unshard()
        self._num_uses += 1
        depth = self._depth
        try:
            yield
        finally:
            self._num_uses -= 1
            self._depth = depth

    def free(self) -> None:
        """Free all gathered parameters, after a forward that no backward will follow."""
        for unit in self.units:
            unit.reshard()

    def free_if_unused(self) -> None:
        """Free all gathered parameters, unless they are being used."""
        if not self._num_uses and not self._depth and not is_running(self.module):
            self.free()

    def reset_depth(self) -> None:
        """Reset the number of running forwards; an interrupt can skip the hook that lowers it."""
        self._depth = 0

    def recover(self) -> None:
        """Reset the state of torch if the last forward or backward has raised.

        The gradients of the failed step and of its window are dropped.
        """
        # Inside a forward, the state of an unfinished forward is not an error.
        if not self._num_uses and not self._depth and is_interrupted(self.module):
            reset(self.module)
            self.drop_gradients()

    @torch.enable_grad()
    def reduce_gradients(self, ids: Collection[int]) -> bool:
        """Reduce the gradients of forwards under ``no_sync``; every rank must call this.

        Returns whether a shard has one of these ids; without one, nothing happens.
        """
        if not any(id(fsdp_param.sharded_param) in ids for fsdp_param in self._params):
            return False
        before, self._skips_sync = self._skips_sync, False
        try:
            self._prepare()
            device = self._params[0].sharded_param.device
            # A backward through the root reduces all of its gradients, even if it adds nothing.
            probe = torch.zeros((), device=device, requires_grad=True)
            call_as_forward(self.module, torch.clone, probe).backward()
        finally:
            self._skips_sync = before
        return True

    def drop_gradients(self, chosen: Collection[int] | None = None) -> None:
        """Drop unreduced gradients of all parameters, or of those whose ids are in ``chosen``."""
        for group in self._groups:
            drop_gradients(group, chosen)

    def gathered(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Return the first of ``parameters`` that is a gathered parameter and not a shard."""
        unsharded_ids = {id(get_unsharded(fsdp_param)) for fsdp_param in self._params}
        return next((param for param in parameters if id(param) in unsharded_ids), None)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        try:
            # Excluded from tracing, because garbage collection may change torch's dict of module
            # states while the compiler iterates over it.
            _untraced(self._prepare)
            if not self._depth:
                _untraced(self._unify_flags)
        finally:
            # The hook after the forward runs in any case.
            self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # Another hook may have raised before `_before_forward`.
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            _untraced(self._copy_flags_to_shards)

    def _prepare(self) -> None:
        """Prepare torch's state before parameters are used."""
        self.recover()
        if not self._num_uses and not self._depth:
            self._shards = _use_replaced(self.module, self._params, self._shards)
        if torch.is_inference_mode_enabled():
            if not self._gathered_once:
                self._gathered_once = True
                _allocate_whole(self.units)
        elif torch.is_grad_enabled() and self._skips_sync is not self._module_skips_sync:
            # Set here, because the backward may run outside of `no_sync`.
            self.module.set_requires_gradient_sync(not self._skips_sync)
            self._module_skips_sync = self._skips_sync
            unreduced.note_forward(self, is_reduced=not self._skips_sync)

    def _unify_flags(self) -> None:
        """Set ``requires_grad`` of shards and whole parameters to the value that was set last."""
        shards = _shard_flags(self._params)
        if shards != whole_flags(self._params, shards):
            # Users can only have changed whole parameters that are gathered now.
            self._copy_flags_to_shards(
                [g.is_unsharded for g in self._groups for _ in g.fsdp_params]
            )
            shards = _shard_flags(self._params)
            for fsdp_param, flag in zip(self._params, shards, strict=True):
                _set_flag(get_unsharded(fsdp_param), flag)
            init_dtypes(self._groups)
        self._known = shards

    def _copy_flags_to_shards(self, chosen: list[bool] | None = None) -> None:
        """Copy changes of ``requires_grad`` from whole parameters to their shards.

        Args:
            chosen: for each parameter, whether to copy; default: copy all.
        """
        previous = self._known
        now = whole_flags(self._params, previous)
        if now == previous:
            return
        for at, fsdp_param in enumerate(self._params):
            if now[at] is not previous[at] and (chosen is None or chosen[at]):
                _set_flag(fsdp_param.sharded_param, now[at])
        init_dtypes(self._groups)

    def note_versions(self) -> bool:
        """Note how often each whole parameter was changed; return whether there are any yet."""
        wholes = ((fsdp_param, get_unsharded(fsdp_param)) for fsdp_param in self._params)
        self._versions = [
            (p, count_changes(unsharded)) for p, unsharded in wholes if unsharded is not None
        ]
        return bool(self._versions)

    def check_versions(self) -> None:
        """Raise RuntimeError if a whole parameter was changed since ``note_versions``.

        FSDP2 frees the whole parameters, so the change that a forward makes would be lost.
        """
        for fsdp_param, version in self._versions:
            unsharded = get_unsharded(fsdp_param)
            if unsharded is not None and count_changes(unsharded) != version:
                ids = id(unsharded), id(fsdp_param.sharded_param)
                named = self.module.named_parameters()
                name = next((name for name, param in named if id(param) in ids), "a parameter")
                raise RuntimeError(
                    f"the forward changes the parameter {name}, and fsdp would lose the change: "
                    "compute another tensor from the weight, or change the weight after the "
                    "update, in on_update of a hook"
                )


def _allocate_whole(units: Iterable[Any]) -> None:
    """Allocate the whole parameters outside of inference mode.

    torch allocates them at the first use and reuses them, but tensors that were created in
    inference mode can never be trained.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        for unit in units:
            unit.unshard()
            unit.reshard()


def _use_replaced(module: nn.Module, parameters: list[Any], known: list[Tensor]) -> list[Tensor]:
    """Make torch gather from local tensors that a module's ``to`` or ``_apply`` has created.

    Otherwise the optimizer would update tensors that no forward reads. Returns the local tensors.
    """
    shards = local_shards(parameters)
    if all(map(is_, shards, known)):
        return known
    for parameter, shard, before in zip(parameters, shards, known, strict=True):
        if shard is before:
            continue
        if not shard.is_contiguous():
            names = {id(candidate): name for name, candidate in module.named_parameters()}
            name = names.get(id(parameter.sharded_param), "a parameter")
            raise RuntimeError(
                f"the memory layout of {name!r} has changed since fsdp sharded the model: the "
                f"strides of its shard are {shard.stride()}, but a shard must be contiguous. "
                "Leave out to(memory_format=...) and similar changes of the parameters, or "
                "use ddp"
            )
        use_local_shard(parameter)
    return local_shards(parameters)


def _shard_flags(parameters: Iterable[Any]) -> list[bool]:
    return [fsdp_param.sharded_param.requires_grad for fsdp_param in parameters]


def _refuse_double_backward(unit: nn.Module, inputs: Any, output: Any) -> None:
    refuse_double_backward(
        output,
        "would use blocks that fsdp has freed; compute it inside of the model's forward and name "
        "no blocks in shard, or use ddp",
    )


def _set_flag(parameter: Any, flag: bool) -> None:
    if parameter is not None and parameter.requires_grad is not flag:
        parameter.requires_grad_(flag)


def _untraced(call: Callable[[], None]) -> None:
    if torch.compiler.is_compiling():
        _outside_of_graphs(call)
    else:
        call()


@uncompiled("flags of parameters are compared outside of graphs")
def _outside_of_graphs(call: Callable[[], None]) -> None:
    call()
