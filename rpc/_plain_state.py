"""A model's own tensors by name, where its state is nothing else: found and filled directly.

`nn.Module.state_dict` and `load_state_dict` take some ten microseconds for each module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
