"""The undocumented state of FSDP2 that this folder uses; no other file reads it.

FSDP2 holds each parameter twice: as the *shard* of this rank, and as the *whole* parameter, which
layers use while it is gathered.

The tests check every undocumented name with torch 2.13 and 2.15. The names were compared with the
source of 2.11 and 2.12. ``check_torch`` looks for all of them when a model is wrapped, and raises
if torch lacks one: stale gradients could be used, or gradients lost, without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

CHECKED = "2.13 or 2.15"


def check_torch(unit: nn.Module) -> None:
    """Raise RuntimeError if ``unit``'s state lacks a name that is used here."""
    missing = []
    for owner, names in _used(unit):
        # Attributes that torch sets at the first forward are declared in the class.
        declared = inspect.get_annotations(type(owner))
        missing += [
            f"{type(owner).__name__}.{name}"
            for name in names
            if not hasattr(owner, name) and name not in declared
        ]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}, without which a fully sharded "
            f"model could train wrongly: use torch {CHECKED}, which is tested, or the wrapper ddp"
        )


def _used(unit: Any) -> Iterable[tuple[Any, tuple[str, ...]]]:
    yield torch._C, ("_current_graph_task_id",)
    yield unit, ("_get_fsdp_state",)
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    yield state, ("_state_ctx", "_pre_forward", "_post_forward")
    groups = _groups_in(state)
    if groups is None:
        yield state, ("_fsdp_param_groups",)
    context = getattr(state, "_state_ctx", None)
    yield context, ("iter_forward_root", "post_backward_final_callback_queued")
    for group in groups or ():
        yield group, ("fsdp_params", "is_unsharded", "_partial_reduce_output")
        yield group, ("_init_mp_dtypes",)
        for one in getattr(group, "fsdp_params", ()):
            yield one, ("sharded_param", "_unsharded_param", "unsharded_accumulated_grad")
            yield one, ("reset_sharded_param",)
            yield getattr(one, "sharded_param", None), ("_local_tensor",)


def get_groups(unit: Any) -> list[Any]:
    """Return torch's groups of parameters of ``unit`` that are gathered together."""
    groups = _groups_in(unit._get_fsdp_state())
    assert groups is not None
    return groups


def _groups_in(state: Any) -> list[Any] | None:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has at most one group.
    if hasattr(state, "_fsdp_param_group"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return None


def local_shards(parameters: Iterable[Any]) -> list[Tensor]:
    """Return the local tensor of each shard."""
    return [parameter.sharded_param._local_tensor for parameter in parameters]


def use_local_shard(parameter: Any) -> None:
    """Gather ``parameter`` from the current local tensor of its shard from now on.

    FSDP2 gathers from the memory that it knows, and looks for new local tensors only in the first
    forward and if ``to`` of an FSDP module replaces them.
    """
    parameter.reset_sharded_param()


def get_unsharded(parameter: Any) -> Tensor | None:
    """Return the whole parameter; None before the first forward."""
    unsharded: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return unsharded


def whole_flags(parameters: Collection[Any], shards: Iterable[bool]) -> list[bool]:
    """Return ``requires_grad`` of each whole parameter, or of its shard before the first gather."""
    try:
        # Called in every forward. After the first one, all parameters have been gathered.
        return [fsdp_param._unsharded_param.requires_grad for fsdp_param in parameters]
    except AttributeError:
        pairs = (
            (get_unsharded(fsdp_param), flag)
            for fsdp_param, flag in zip(parameters, shards, strict=True)
        )
        return [flag if param is None else param.requires_grad for param, flag in pairs]


def drop_gradients(group: Any, chosen: Collection[int] | None = None) -> None:
    """Drop unreduced gradients of all parameters, or of those whose ids are in ``chosen``.

    FSDP2 keeps the gradients of forwards under ``no_sync``, and of a backward that raised, in the
    whole parameters, where ``zero_grad`` does not clear them.
    """
    dropped = 0
    for fsdp_param in group.fsdp_params:
        unsharded = get_unsharded(fsdp_param)
        if chosen is None or id(fsdp_param.sharded_param) in chosen or id(unsharded) in chosen:
            dropped += 1
            if "unsharded_accumulated_grad" in vars(fsdp_param):
                # torch 2.15 keeps gradients only in the whole parameter.
                fsdp_param.unsharded_accumulated_grad = None
            if unsharded is not None:
                unsharded.grad = None
    if dropped == len(group.fsdp_params):
        # Under HSDP: gradients that are reduced over the shards, but not over the copies.
        group._partial_reduce_output = None


def init_dtypes(groups: Iterable[Any]) -> None:
    """Initialise the reduction dtypes of groups whose parameters were all frozen at first.

    Up to 2.14, torch reads the dtypes at the first forward, and only from trained parameters. 2.15
    has no ``_orig_dtype``, so there they are always read again.
    """
    for group in groups:
        if getattr(group, "_orig_dtype", None) is None:
            group._init_mp_dtypes()


def is_in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def is_running(root: Any) -> bool:
    """Return whether a forward or backward is using the whole parameters of ``root``."""
    return is_in_backward() or root._get_fsdp_state()._state_ctx.iter_forward_root is not None


def is_interrupted(root: Any) -> bool:
    """Return whether the last forward or backward of ``root`` raised; do not call it inside one."""
    context = root._get_fsdp_state()._state_ctx
    started = context.iter_forward_root is not None or context.post_backward_final_callback_queued
    return bool(started) and not is_in_backward()


def reset(root: Any) -> None:
    """Reset the state of ``root`` after a forward or a backward that has raised."""
    if not hasattr(root, "reset_iter_state"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot use a sharded model after a forward or a backward "
            f"that raised: create the model and its wrapper again, or use torch {CHECKED}"
        )
    root.reset_iter_state()


def call_as_forward(root: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` as if it were the forward of ``root``, without setting it as a method."""
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    prepared, named = state._pre_forward(root, args, {})
    return state._post_forward(root, prepared, function(*prepared, **named))
