"""The metrics inside wrappers of torchmetrics, and which outputs of a step these wrappers take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Parameters = Mapping[str, inspect.Parameter]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_wrapper(metric: Any) -> bool:
    """Return whether a class of ``torchmetrics.wrappers`` wraps the metric."""
    return type(metric).__module__.startswith("torchmetrics.wrappers.")


def get_inner_metrics(metric: nn.Module) -> list[Any]:
    """Return the metrics directly inside a wrapper, a collection or a composition."""
    inner_metrics: list[Any] = []
    for child in metric.children():
        is_container = type(child) in (nn.ModuleList, nn.ModuleDict)
        inner_metrics += child.children() if is_container else [child]
    return inner_metrics


def transforms_inputs(metric: Any) -> bool:
    """Return whether a metric, or one in its wrappers, is a MetricInputTransformer.

    It transforms only arguments that are passed by position.
    """
    if _is_transformer(metric):
        return True
    return is_wrapper(metric) and any(map(transforms_inputs, get_inner_metrics(metric)))


def get_update_parameters(metric: Any, update: Callable[..., Any]) -> Parameters | None:
    """Return the parameters of ``update`` by name; None if it takes every output of a step.

    A wrapper takes what the metrics inside it take.
    """
    parameters = inspect.signature(update).parameters
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return {name: p for name, p in parameters.items() if p.kind not in _VARIADIC}
    return _inner_parameters(metric) if is_wrapper(metric) or _is_transformer(metric) else None


def _inner_parameters(wrapper: nn.Module) -> Parameters | None:
    merged: dict[str, inspect.Parameter] = {}
    for metric in get_inner_metrics(wrapper):
        parameters = get_update_parameters(metric, metric.update)
        if parameters is None and _divides_arguments(metric):
            parameters = _inner_parameters(metric)
        if parameters is None:
            return None
        merged |= parameters
    return merged


def prepare_wrappers(name: str, metric: nn.Module, ranks: int) -> None:
    """Let collections and compositions give each wrapper inside them only what it takes.

    Raises:
        ValueError: the result of a wrapper would be wrong; the message names it.
    """
    for module in metric.modules():
        if is_wrapper(module) and type(module).__name__ == "Running" and ranks > 1:
            raise ValueError(
                f"metrics.{name}: Running keeps the last batches of each process, so its result "
                f"depends on the number of processes, which is {ranks}: use the metric inside it, "
                "or one process"
            )
        for inner in get_inner_metrics(module) if _divides_arguments(module) else ():
            if transforms_inputs(inner):
                raise ValueError(
                    f"metrics.{name}: {type(inner).__name__} does not transform the arguments that "
                    f"a {type(module).__name__} passes by name: name it as a separate metric, "
                    "or put the collection into it"
                )
            if is_wrapper(inner) and (parameters := get_update_parameters(inner, inner.update)):
                kind = inspect.Parameter.KEYWORD_ONLY
                named = [parameter.replace(kind=kind) for parameter in parameters.values()]
                inner._update_signature = inspect.Signature(named)


def refuse_tracker(name: str, metric: Any) -> None:
    """Raise TypeError for a MetricTracker, which needs a call before every evaluation."""
    if is_wrapper(metric) and type(metric).__name__ == "MetricTracker":
        raise TypeError(
            f"metrics.{name} must be the metric inside a MetricTracker: the values of every "
            "evaluation are recorded, and hooks.checkpoint.keep_best keeps the best one"
        )


def _is_transformer(metric: Any) -> bool:
    return any(kind.__name__ == "MetricInputTransformer" for kind in type(metric).__mro__)


def _divides_arguments(metric: Any) -> bool:
    """Return whether a metric gives each metric inside it what that one takes."""
    is_collection = isinstance(metric, nn.ModuleDict) and hasattr(metric, "compute")
    return is_collection or type(metric).__name__ == "CompositionalMetric"
