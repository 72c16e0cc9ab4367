"""Weights under the user's names, and their distance."""

from typing import Any

from torch import Tensor, nn

from stepwrap.wrappers.layout import as_global


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters by name, unsharded; every rank must call this."""
    weights = {}
    for name, parameter in model.named_parameters():
        placed: Any = as_global(parameter, like=parameter)
        full = placed.full_tensor() if hasattr(placed, "full_tensor") else placed
        weights[name.replace(".module.", ".")] = full.detach().clone()
    return weights


def apart(weights: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between weights of the same names."""
    assert list(weights) == list(other)
    return max(
        (weights[name].double() - other[name].double()).abs().max().item() for name in weights
    )
