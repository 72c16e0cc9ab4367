"""From a dict of losses to the one that is optimised and those that are logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor


def parse_losses(losses: Mapping[str, Tensor | list[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses; return the total and the detached values to log.

    A tensor counts by its mean, a list of tensors by the sum of their means. Entries whose
    name contains "loss" are optimised, the others only logged. The log holds the total as
    ``loss`` first, then every entry; beside other losses, an entry that is itself named
    ``loss`` is logged as ``loss_raw``.

    Raises:
        TypeError: an entry is neither a tensor nor a list of tensors.
        ValueError: there is no loss to optimise.
    """
    if not isinstance(losses, Mapping):
        raise TypeError(
            f"forward(..., mode='loss') must return a dict of losses, got {type(losses).__name__}"
        )
    only = losses.get("loss") if len(losses) == 1 else None
    if _is_plain(only):
        # What most steps have, at a third of the cost.
        return only, {"loss": only.detach()}
    total: Tensor | None = None
    raw: Tensor | None = None
    counted = 0
    # The total takes the first place, whatever comes after.
    logs: dict[str, Any] = {"loss": None}
    for name, value in losses.items():
        part = value if _is_plain(value) else _reduce(name, value)
        if part is None:
            continue
        if "loss" in name:
            total = part if total is None else total + part
            counted += 1
        if name == "loss":
            raw = part
        else:
            logs[name] = part.detach()
    if total is None:
        raise ValueError(
            "there is no loss to optimise: a name must contain 'loss' and its value must not "
            f"be empty; got {sorted(losses)}"
        )
    logs["loss"] = total.detach()
    if counted > 1 and raw is not None:
        logs["loss_raw"] = raw.detach()
    return total, logs


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether ``value`` is one real number already."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _reduce(name: str, value: Any) -> Tensor | None:
    """One 0-d floating tensor out of an entry; None for an empty list."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            value = value.float()
        # A mean of one number would only lengthen the graph.
        mean: Tensor | None = value.mean() if value.ndim else value
        return mean
    if not isinstance(value, list) or not all(isinstance(part, Tensor) for part in value):
        raise TypeError(f"{name} is not a tensor or list of tensors, got {type(value).__name__}")
    total: Tensor | None = None
    for part in value:
        mean = _reduce(name, part)
        total = mean if total is None or mean is None else total + mean
    return total
