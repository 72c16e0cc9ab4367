"""Gradient clipping, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from ..sharding.layout import has_placed, local_part, total_norm
from ..torch_functions import check_options

_OPTIONS = {
    "norm": ("max_norm", "norm_type", "error_if_nonfinite", "foreach"),
    "value": ("clip_value", "foreach"),
}


@dataclass(frozen=True)
class GradClip:
    """How the gradients of an optimizer are clipped.

    Attributes:
        kind: "norm" (the total norm) or "value" (every element).
        options: arguments of torch's ``clip_grad_norm_`` / ``clip_grad_value_``.
    """

    kind: str
    options: Mapping[str, Any]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GradClip:
        """Check ``{"type": "norm", "max_norm": 1.0, ...}``; the mapping is left as it is.

        Without a type it is "value" where there is a ``clip_value``, else "norm".

        Raises:
            AssertionError: no mapping, or nothing in it but ``type``.
            ValueError: ``type`` is neither "norm" nor "value".
            TypeError: torch's clipping function has no such argument.
        """
        if not isinstance(settings, Mapping) or not settings:
            raise AssertionError(
                "If `clip_grad` is not None, it should be a `dict` which is the arguments of "
                "`torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.clip_grad_value_`, "
                f"got {settings!r}"
            )
        options = dict(settings)
        kind = options.pop("type", "value" if "clip_value" in options else "norm")
        if kind not in _OPTIONS:
            raise ValueError(f'type of clip_grad should be "norm" or "value" but got {kind!r}')
        if not options:
            raise AssertionError(
                "`clip_grad` should contain other arguments besides `type`: "
                f"for {kind!r} at least {_OPTIONS[kind][0]!r}"
            )
        check_options(f"clip_grad of type {kind!r}", options, _OPTIONS[kind])
        return cls(kind, options)

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Clip in place; the total norm before clipping, on its device (None for "value").

        Where parameters are sharded every rank must call this, and gets the same norm: that of
        the whole gradients.
        """
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.grad is not None
        ]
        placed = has_placed(optimizer)
        if self.kind == "norm":
            clip = _clip_parts_by_norm if placed else clip_grad_norm_
            return clip(parameters, **self.options)
        if placed:
            _clip_parts_by_value(parameters, **self.options)
        else:
            clip_grad_value_(parameters, **self.options)
        return None


# What torch adds to the norm before it divides by it.
_EPSILON = 1e-6


@torch.no_grad()
def _clip_parts_by_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As torch's ``clip_grad_norm_``, which fails on parameters of different meshes.

    ``foreach`` has no effect: gradients on one device are scaled together.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    total = total_norm(gradients, float(norm_type), like=parameters)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it "
            "cannot be clipped; error_if_nonfinite=False goes on nevertheless"
        )
    # Clamped in place of compared, which would make the device wait.
    scale = (max_norm / (total + _EPSILON)).clamp(max=1.0)
    for device, parts in _by_device(gradients).items():
        torch._foreach_mul_(parts, scale.to(device))
    return total


@torch.no_grad()
def _clip_parts_by_value(
    parameters: Sequence[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    bound = float(clip_value)
    for parts in _by_device(_gradient(parameter) for parameter in parameters).values():
        torch._foreach_clamp_min_(parts, -bound)
        torch._foreach_clamp_max_(parts, bound)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    devices: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        devices.setdefault(gradient.device, []).append(gradient)
    return devices
