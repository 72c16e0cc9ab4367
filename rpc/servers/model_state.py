"""A model's state under the user's own names: taken to the CPU, and loaded whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# What makes a module with a `module` inside a wrapper that steps it.
_STEPS = ("train_step", "val_step", "test_step")
_SHOWN = 5


def check_model(model: object) -> None:
    """Check that it is a model.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model inside of wrappers for parallelism and compilation."""
    while True:
        inner = _inside(model)
        if inner is None:
            return model
        model = inner


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and buffers on the CPU, under the user's own names.

    Of a sharded model they are whole: all ranks that share it must call this.
    """
    return {name: copied(value) for name, value in state_of(model).items()}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state itself under the user's own names, detached, on whatever devices."""
    return dict(unwrap(model).state_dict())


def copied(value: Any) -> Any:
    """Return a copy of one entry of a state: of a tensor on the CPU, and whole."""
    if _is_sharded(value):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def on_cpu(value: Any) -> Any:
    """Return one entry of a state on the CPU, and whole: itself where it is, else a copy."""
    is_there = not isinstance(value, Tensor) or value.device.type == "cpu"
    return value if is_there and not _is_sharded(value) else copied(value)


def load_snapshot(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a state into a model's own tensors, on their devices and in their types.

    Gradients are left alone.

    Raises:
        KeyError: the names differ; they are told, and nothing was loaded.
        ValueError: shapes differ; likewise.
    """
    inner = unwrap(model)
    tensors = own_tensors(inner)
    own: Mapping[str, Any] = inner.state_dict() if tensors is None else tensors
    _check(own, state)
    if tensors is not None and all(map(is_plain, state.values())):
        fill(tensors, state)
        return
    placed = {name: _placed_like(own[name], value) for name, value in state.items()}
    inner.load_state_dict(placed)


def _inside(model: nn.Module) -> nn.Module | None:
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return compiled
    module = getattr(model, "module", None)
    is_wrapper = isinstance(model, DataParallel | DistributedDataParallel) or all(
        hasattr(model, step) for step in _STEPS
    )
    return module if is_wrapper and isinstance(module, nn.Module) else None


def _check(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if own.keys() != state.keys():
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        parts = [f"lacks {_named(missing)}, which the model has"] if missing else []
        parts += [f"has {_named(extra)}, which the model lacks"] if extra else []
        raise KeyError(f"another model's state: it {' and '.join(parts)}")
    wrong = [
        f"{name!r} is {tuple(state[name].shape)} in it and {tuple(value.shape)} in the model"
        for name, value in own.items()
        if isinstance(value, Tensor) and state[name].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"another model's state: {_listed(wrong)}")


def _placed_like(own: Any, value: Any) -> Any:
    """Return a tensor for loading into `own`: cut where that is sharded, without communication."""
    if not _is_sharded(own):
        return value
    # Half a second, and only sharded models need it.
    from torch.distributed.tensor import distribute_tensor

    value = value.to(own.device_mesh.device_type)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def _named(names: Iterable[str]) -> str:
    return _listed(map(repr, sorted(names)))


def _listed(parts: Iterable[str]) -> str:
    all_parts = list(parts)
    more = len(all_parts) - _SHOWN
    return ", ".join(all_parts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


_METHODS = (
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)
_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OWN_TYPES = frozenset({Tensor, nn.Parameter})
# What these do beyond the usual is to load states of before a buffer was added, which lack it.
_OLD_STATES = nn.BatchNorm1d._load_from_state_dict


def own_tensors(model: nn.Module) -> dict[str, Tensor] | None:
    """Return parameters and persistent buffers under the names of `state_dict`.

    None where a module has its own way of saving or loading, or a tensor its own type.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        return None
    found: dict[str, Tensor] = {}
    return found if _collect(model, "", found, set()) else None


def is_plain(value: Any) -> bool:
    """Return whether something is a tensor of no special kind, on any device that has memory."""
    if type(value) not in _OWN_TYPES or value.is_meta:
        return False
    return value.layout is torch.strided and not value.is_quantized


def fill(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copy tensors of the same names and shapes into a model's own."""
    # By tensor: of one with two names the last value counts, as in `load_state_dict`.
    pairs = {id(tensor): (tensor, state[name]) for name, tensor in own.items()}
    targets = [tensor for tensor, _ in pairs.values()]
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, [value for _, value in pairs.values()])


def _collect(module: nn.Module, prefix: str, found: dict[str, Tensor], seen: set[type]) -> bool:
    """Add a module's tensors; False where there is more to its state."""
    if not _is_usual(module, seen):
        return False
    transient = module._non_persistent_buffers_set
    for tensors, left_out in ((module._parameters, ()), (module._buffers, transient)):
        for name, tensor in tensors.items():
            if tensor is None or name in left_out:
                continue
            if not is_plain(tensor):
                return False
            found[prefix + name] = tensor
    return all(
        child is None or _collect(child, f"{prefix}{name}.", found, seen)
        for name, child in module._modules.items()
    )


def _is_usual(module: nn.Module, seen: set[type]) -> bool:
    """Return whether a module saves and loads as nn.Module does."""
    attributes = vars(module)
    if any(attributes[hooks] for hooks in _HOOKS):
        return False
    if not attributes.keys().isdisjoint(_METHODS):
        return False
    kind = type(module)
    if kind in seen:
        return True
    for name in _METHODS:
        method = getattr(kind, name)
        if method is not getattr(nn.Module, name) and method is not _OLD_STATES:
            return False
    seen.add(kind)
    return True
