"""Take and load a model's state under the user's names, without parallel wrappers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...collectives.errors import shorten

# A module that has these methods and a `module` is one of our wrappers.
_STEPS = ("train_step", "val_step", "test_step")
# Methods that a module overrides to change how it is saved or loaded.
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
# This override only loads old checkpoints that lack a newer buffer, so it does not matter here.
_OLD_STATES = nn.BatchNorm1d._load_from_state_dict


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model without wrappers for parallelism and compilation."""
    inner = getattr(model, "_orig_mod", None)
    if not isinstance(inner, nn.Module):
        is_wrapper = isinstance(model, DataParallel | DistributedDataParallel) or all(
            hasattr(model, step) for step in _STEPS
        )
        inner = getattr(model, "module", None) if is_wrapper else None
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return copies of a model's parameters and buffers on the CPU, under the user's names.

    Sharded tensors are gathered: all ranks of a sharded model must call this.
    """
    return {name: copied(value) for name, value in get_state(model).items()}


def get_state(model: nn.Module) -> dict[str, Any]:
    """Return the detached state under the user's names, without copies."""
    return dict(unwrap(model).state_dict())


def copied(value: Any) -> Any:
    """Return a copy of one entry of a state; tensors are gathered and moved to the CPU."""
    if _is_sharded(value):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def copy_to_cpu(value: Any) -> Any:
    """Return one entry of a state, gathered and on the CPU, without a copy if possible."""
    is_there = not isinstance(value, Tensor) or value.device.type == "cpu"
    return value if is_there and not _is_sharded(value) else copied(value)


def load_snapshot(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy a state into a model's tensors, keeping their devices, dtypes and gradients.

    Raises:
        KeyError: the names differ; nothing is loaded.
        TypeError: entries are not tensors, but are tensors in the model; nothing is loaded.
        ValueError: the shapes differ; nothing is loaded.
    """
    inner = unwrap(model)
    is_usual = not torch.__future__.get_swap_module_params_on_conversion() and all(
        map(_is_usual, inner.modules())
    )
    model_state = inner.state_dict(keep_vars=True) if is_usual else inner.state_dict()
    check_same_model(model_state, state)
    if not is_usual or not all(map(_is_plain, [*model_state.values(), *state.values()])):
        inner.load_state_dict(
            {name: _placed_like(model_state[name], state[name]) for name in state}
        )
        return
    # Up to three times as fast as `load_state_dict` for many tensors. Both load the last value into
    # a tensor that has two names.
    pairs = {id(tensor): (tensor, state[name]) for name, tensor in model_state.items()}
    if pairs:
        targets, values = zip(*pairs.values(), strict=True)
        with torch.no_grad():
            torch._foreach_copy_(targets, values)


def _is_usual(module: nn.Module) -> bool:
    """Return whether a module is saved and loaded as ``nn.Module`` does by default."""
    attributes = vars(module)
    if any(attributes[hooks] for hooks in _HOOKS) or not attributes.keys().isdisjoint(_METHODS):
        return False
    kind: Any = type(module)
    return _has_usual_methods(kind)


@lru_cache(maxsize=256)
def _has_usual_methods(kind: Any) -> bool:
    usual = {name: getattr(nn.Module, name) for name in _METHODS}
    return all(getattr(kind, name) in (usual[name], _OLD_STATES) for name in _METHODS)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor or parameter with memory on any device."""
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        return False
    return value.layout is torch.strided and not value.is_quantized


def check_same_model(model_state: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError if a model's names, types or shapes differ."""
    if model_state.keys() != state.keys():
        missing, extra = model_state.keys() - state.keys(), state.keys() - model_state.keys()
        differences = [f"the state lacks {list_names(missing)}"] if missing else []
        differences += [f"the model lacks {list_names(extra)}"] if extra else []
        raise KeyError(f"the state must be of the same model, but {' and '.join(differences)}")
    kinds = [
        f"{name!r} is {type(state[name]).__name__} in the state, a tensor in the model"
        for name, value in model_state.items()
        if isinstance(value, Tensor) and not isinstance(state[name], Tensor)
    ]
    if kinds:
        raise TypeError(f"the state must be of the same model, but {shorten(kinds)}")
    wrong = [
        f"{name!r} is {tuple(state[name].shape)} in the state, {tuple(value.shape)} in the model"
        for name, value in model_state.items()
        if isinstance(value, Tensor) and state[name].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"the state must be of the same model, but {shorten(wrong)}")


def _placed_like(target: Any, value: Any) -> Any:
    """Return a tensor for loading into ``target``, sharded like it without communication."""
    if not _is_sharded(target):
        return value
    # Imported lazily: it takes half a second, and only sharded models need it.
    from torch.distributed.tensor import distribute_tensor

    value = value.to(target.device_mesh.device_type)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def list_names(names: Iterable[str]) -> str:
    """Return the first sorted names and the number of the others, for an error."""
    return shorten([repr(name) for name in sorted(names)])
