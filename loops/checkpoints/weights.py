"""The user's model and the names of its weights, whatever it is wrapped in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ...wrappers import (
    as_global,
    drop_held_gradients,
    is_dtensor,
    is_model_wrapper,
    is_sharded,
    layout_of,
    local_part,
    take_part,
)
from ..state import LoopState
from .plain import plain
from .together import world_size

# The child in which torch.compile keeps the module that it was given.
_COMPILED = "_orig_mod"


def user_model(wrapper: nn.Module) -> nn.Module:
    """Return the model inside wrappers and `torch.compile`; a bare model itself."""
    model = wrapper
    while True:
        children = model._modules
        inner = children.get(_COMPILED)
        if inner is None and is_model_wrapper(model):
            inner = children.get("module")
        if inner is None:
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the name of a weight or module without what `torch.compile` adds to it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def state_of(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of `model`, as it is named there, with all its parts as DTensors."""
    state: Any = model.state_dict()
    for name, tensor in _localised(model):
        if name in state:
            state[name] = as_global(state[name], tensor)
    named: OrderedDict[str, Any] = state
    return named


def weights_of(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of `model` with the user's names.

    Raises:
        TypeError: Something in it cannot be loaded safely; says where.
    """
    state = state_of(model)
    weights = OrderedDict((plain_name(k), plain(v, f"model: {k}")) for k, v in state.items())
    _set_versions(weights, {plain_name(k): v for k, v in _versions(state).items()})
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load what `weights_of` returned into `model`, which may be compiled or not.

    Of sharded tensors this rank's parts are taken; anything that can be cut like a tensor may
    stand for the wholes.
    """
    present = model.state_dict()
    for name, tensor in _localised(model):
        if not is_dtensor(present[name]):
            # Without its mark of a part: the model has no hook that would take a DTensor.
            present[name] = tensor
    own = {plain_name(name): name for name in present}
    state = OrderedDict(
        (own[name], _fitted(value, present[own[name]])) for name, value in weights.items()
    )
    versions = _versions(weights)
    names = {name: plain_name(name) for name, _ in model.named_modules()}
    _set_versions(state, {n: versions[plain] for n, plain in names.items() if plain in versions})
    model.load_state_dict(state)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of this rank's parts of the gradients, by the user's names."""
    # Copied: under DDP a gradient may be a view that would be written with its whole bucket.
    named = model.named_parameters()
    return {plain_name(name): local_part(p.grad).clone() for name, p in named if p.grad is not None}


def gradient_places(model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """Return where the parts of sharded parameters begin in the whole, and their sizes."""
    named = [(name, layout_of(p)) for name, p in model.named_parameters() if is_sharded(p)]
    return {plain_name(name): (list(at.offsets), list(at.sizes)) for name, at in named}


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Set this rank's parts of the gradients: none where `gradients` has none."""
    drop_held_gradients(model.parameters())
    for name, parameter in model.named_parameters():
        saved = gradients.get(plain_name(name))
        if saved is None:
            parameter.grad = None
            continue
        part = saved.to(parameter.device)
        parameter.grad = as_global(part, parameter) if is_dtensor(parameter) else part


def data_size(model: nn.Module) -> int:
    """Return how many ranks see different batches."""
    group: Any = getattr(model, "data_group", None)
    return world_size() if group is None else int(group.size())


def is_spread(state: LoopState) -> bool:
    """Say whether no rank alone knows the weights, or the optimizer's state."""
    if getattr(state.optim_wrapper, "collective_state", False):
        return True
    return any(map(is_sharded, state.model.parameters()))


def _localised(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The ordinary tensors of `model` that are parts, by all their names."""
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return [(n, t) for n, t in named if hasattr(t, "tensor_layout")]


def _fitted(value: Any, like: Any) -> Any:
    """What torch can load in the place of `like`."""
    if not isinstance(like, Tensor) or not hasattr(value, "shape"):
        return value
    # On a mesh of one rank nothing is sharded, yet a DTensor takes nothing but a DTensor.
    placed = any(is_dtensor(one) for one in (value, like)) or is_sharded(like)
    return take_part(value, like) if placed or not isinstance(value, Tensor) else value


def _versions(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The modules' version numbers, which torch keeps beside the weights."""
    versions: Mapping[str, Any] = getattr(state, "_metadata", {})
    return versions


def _set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    vars(state)["_metadata"] = OrderedDict(versions)
