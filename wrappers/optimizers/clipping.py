"""Gradient clipping by torch's functions, also for parameters that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer

from ..layout import get_parameters, has_placed_parameters, local_part, total_norm
from ..torch_functions import check_options, option_names

_CLIPS: dict[str, Any] = {"norm": clip_grad_norm_, "value": clip_grad_value_}


class GradClip:
    """Clip the gradients of an optimizer by torch's function for "norm" or "value".

    Attributes:
        returns_l2: whether a call returns the L2 norm of the gradients, whatever it clips by.

    Raises:
        AssertionError: ``settings`` is not a mapping, or lacks "max_norm" or "clip_value".
        TypeError: an argument is unknown.
        ValueError: ``type`` is neither "norm" nor "value".
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if not isinstance(settings, Mapping) or not settings:
            raise AssertionError(
                "If `clip_grad` is not None, it should be a `dict` which is the arguments of "
                "`torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.clip_grad_value_`, "
                f"got {settings!r}"
            )
        self.returns_l2 = False
        self.options = options = dict(settings)
        self.kind = kind = options.pop("type", "value" if "clip_value" in options else "norm")
        if kind not in _CLIPS:
            raise ValueError(f'type of clip_grad should be "norm" or "value" but got {kind!r}')
        allowed = option_names(_CLIPS[kind])[1:]
        check_options(f"clip_grad of type {kind!r}", options, allowed)
        if allowed[0] not in options:
            raise AssertionError(
                "`clip_grad` should contain other arguments besides `type`: "
                f"for {kind!r} at least {allowed[0]!r}, got {dict(settings)!r}"
            )

    def __repr__(self) -> str:
        return f"GradClip(kind={self.kind!r}, options={self.options})"

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Clip in place; return the total norm before clipping, None for "value".

        Every rank must call this if parameters are sharded. The norm is of the order by which the
        gradients are clipped, unless ``returns_l2`` is set.
        """
        parameters: Any = [
            parameter
            for parameter in get_parameters(optimizer)
            if parameter.requires_grad and parameter.grad is not None
        ]
        if self.returns_l2 and (self.kind == "value" or self.options.get("norm_type", 2.0) != 2.0):
            norm = total_norm([param.grad for param in parameters], like=parameters)
            self._clip(optimizer, parameters)
            return norm
        return self._clip(optimizer, parameters)

    def _clip(self, optimizer: Optimizer, parameters: Any) -> Tensor | None:
        clip: Callable[..., Tensor | None] = _CLIPS[self.kind]
        if not has_placed_parameters(optimizer):
            return clip(parameters, **self.options)
        # torch's functions fail on parameters of different meshes. They only read ``grad``, so they
        # get this rank's parts of the gradients.
        local_params = [SimpleNamespace(grad=local_part(param.grad)) for param in parameters]
        if self.kind == "norm":
            return _clip_parts_by_norm(parameters, local_params, **self.options)
        return clip(local_params, **self.options)


@torch.no_grad()
def _clip_parts_by_norm(
    parameters: Any,
    local_params: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    total = total_norm([param.grad for param in parameters], float(norm_type), like=parameters)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it "
            "cannot be clipped; set error_if_nonfinite=False to continue anyway"
        )
    clip_grads_with_norm_(local_params, max_norm, total, foreach)
    return total
