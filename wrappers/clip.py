"""Gradient clipping, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from .options import check_options

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

        Raises:
            AssertionError: no mapping, or nothing in it but ``type``.
            ValueError: ``type`` is neither "norm" nor "value".
            TypeError: torch's clipping function has no such argument.
        """
        if not isinstance(settings, Mapping) or not settings:
            raise AssertionError(
                "If `clip_grad` is not None, it must be a dict of the arguments of "
                f"torch.nn.utils.clip_grad_norm_ or clip_grad_value_, got {settings!r}"
            )
        options = dict(settings)
        kind = options.pop("type", "norm")
        if kind not in _OPTIONS:
            raise ValueError(f"clip_grad type must be 'norm' or 'value', got {kind!r}")
        if not options:
            raise AssertionError(
                f"`clip_grad` of type {kind!r} must hold {_OPTIONS[kind][0]!r}, got {settings!r}"
            )
        check_options(f"clip_grad of type {kind!r}", options, _OPTIONS[kind])
        return cls(kind, options)

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Clip in place; the total norm before clipping, on its device (None for "value")."""
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.grad is not None
        ]
        if self.kind == "norm":
            return clip_grad_norm_(parameters, **self.options)
        clip_grad_value_(parameters, **self.options)
        return None
