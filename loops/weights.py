"""The user's model and the names of its weights, whatever it is wrapped in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..wrappers import is_model_wrapper
from .plain import plain

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


def weights_of(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state dict of `model` with the user's names.

    Raises:
        TypeError: Something in it cannot be loaded safely; says where.
    """
    state = model.state_dict()
    weights = OrderedDict((plain_name(k), plain(v, f"model: {k}")) for k, v in state.items())
    _set_versions(weights, {plain_name(k): v for k, v in _versions(state).items()})
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load what `weights_of` returned into `model`, which may be compiled or not."""
    own = {plain_name(name): name for name in model.state_dict()}
    state = OrderedDict((own[name], value) for name, value in weights.items())
    versions = _versions(weights)
    names = {name: plain_name(name) for name, _ in model.named_modules()}
    _set_versions(state, {n: versions[plain] for n, plain in names.items() if plain in versions})
    model.load_state_dict(state)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients, by the user's names."""
    # Copied: under DDP a gradient may be a view that would be written with its whole bucket.
    named = model.named_parameters()
    return {plain_name(name): p.grad.clone() for name, p in named if p.grad is not None}


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Set the gradients of all parameters: none where `gradients` has none."""
    for name, parameter in model.named_parameters():
        saved = gradients.get(plain_name(name))
        parameter.grad = None if saved is None else saved.to(parameter.device)


def _versions(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The modules' version numbers, which torch keeps beside the weights."""
    versions: Mapping[str, Any] = getattr(state, "_metadata", {})
    return versions


def _set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    vars(state)["_metadata"] = OrderedDict(versions)
