"""Whether higher values of a metric are better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...registry.directions import direction_by_words
from .wrapped import get_inner_metrics, is_wrapper


def find_directions(metrics: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return for each metric whether higher values are better; None if that is unknown.

    The attribute ``higher_is_better`` decides: the metric's, or the one on which the metrics inside
    a wrapper of torchmetrics or a MetricCollection agree. Otherwise words in the metric's name or
    class decide.
    """
    directions: dict[str, bool | None] = {}
    for name, metric in metrics.items():
        directions[name] = _direction(name, metric)
        if isinstance(metric, nn.ModuleDict):  # a MetricCollection
            members = {f"{name}/{key}": member for key, member in metric.items()}
            directions |= {key: _direction(key, member) for key, member in members.items()}
    return directions


def _direction(name: str, metric: Any) -> bool | None:
    direction = _declared_direction(metric)
    if direction is None:
        direction = direction_by_words(name.rpartition("/")[2])
    return direction_by_words(type(metric).__name__) if direction is None else direction


def _declared_direction(metric: Any) -> bool | None:
    """Return ``higher_is_better`` of a metric, or the one on which its wrapped metrics agree.

    Compositions, such as ``1 - accuracy``, and metrics of users may reverse the direction of the
    metrics inside them.
    """
    direction: bool | None = getattr(metric, "higher_is_better", None)
    if direction is not None:
        return direction
    if not (is_wrapper(metric) or isinstance(metric, nn.ModuleDict)):
        return None
    directions = {_declared_direction(inner) for inner in get_inner_metrics(metric)}
    return directions.pop() if len(directions) == 1 else None
