"""Whether higher values of a metric are better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...registry.directions import direction_by_words


def find_directions(metrics: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return for each metric whether higher values are better; None if that is unknown.

    The attribute ``higher_is_better`` decides, otherwise words in the metric's name or class.
    """
    directions: dict[str, bool | None] = {}
    for name, metric in metrics.items():
        directions[name] = _direction(name, metric)
        if isinstance(metric, nn.ModuleDict):  # a MetricCollection
            members = {f"{name}/{key}": member for key, member in metric.items()}
            directions |= {key: _direction(key, member) for key, member in members.items()}
    return directions


def _direction(name: str, metric: Any) -> bool | None:
    # A wrapper of torchmetrics has the direction of the metric inside it.
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    directions = {getattr(module, "higher_is_better", None) for module in modules} & {True, False}
    if directions:
        return directions.pop() if len(directions) == 1 else None
    by_name = direction_by_words(name.rpartition("/")[2])
    return direction_by_words(type(metric).__name__) if by_name is None else by_name
