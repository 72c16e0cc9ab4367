"""Select what a metric gets: the outputs of one head, or outputs changed by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...primitives.notes import add_note
from ...registry import did_you_mean
from ..error_notes import describe, get_name


class MetricInputsError(ValueError):
    """Raised if the step's outputs lack what a metric needs, or what ``MetricInputs`` selects.

    Attributes:
        setting: the key path in a config, such as "metrics.error" or "metrics.error.head".
    """

    def __init__(self, setting: str, text: str) -> None:
        super().__init__(setting, text)
        self.setting = setting
        self.text = text

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}"


@dataclass(frozen=True)
class MetricInputs:
    """A metric, and which outputs of a step it gets.

    Attributes:
        metric: a metric of torchmetrics, or a ``BaseMetric``.
        head: a key of ``preds``, for steps that return predictions by head: the metric gets
            ``preds[head]``. Other outputs that are mappings with this key, such as ``target``, are
            replaced by their entries in the same way.
        transform: a function whose result replaces ``preds``, after the head was selected. If the
            step does not return a mapping, the function gets the step's result.
    """

    metric: Any
    head: str | None = None
    transform: Callable[[Any], Any] | None = None

    def select(self, name: str, outputs: Any) -> Any:
        """Return the outputs for the metric ``name``.

        Raises:
            MetricInputsError: ``preds`` has no such head, or there are no ``preds``.
        """
        if self.head is not None:
            outputs = self._select_head(f"metrics.{name}.head", self.head, outputs)
        if self.transform is None:
            return outputs
        if not isinstance(outputs, Mapping):
            return self._transformed(name, outputs)
        preds = _get_preds(outputs, f"metrics.{name}.transform")
        return {**outputs, "preds": self._transformed(name, preds)}

    def _select_head(self, setting: str, head: str, outputs: Any) -> dict[str, Any]:
        heads = _get_preds(outputs, setting)
        if not isinstance(heads, Mapping):
            message = f"requires predictions by head, but preds is {describe(heads)}"
            raise MetricInputsError(setting, message)
        if head not in heads:
            message = f"preds has no head {head!r}{did_you_mean(head, map(str, heads))}"
            raise MetricInputsError(
                setting, f"{message}; the heads are: {', '.join(map(str, heads))}"
            )
        return {
            key: value[head] if isinstance(value, Mapping) and head in value else value
            for key, value in outputs.items()
        }

    def _transformed(self, name: str, preds: Any) -> Any:
        assert self.transform is not None
        try:
            return self.transform(preds)
        except Exception as error:
            function = get_name(self.transform)
            text = f"in transform {function} of metric {name!r}, which was given {describe(preds)}"
            add_note(error, text)
            raise


def _get_preds(outputs: Any, setting: str) -> Any:
    if isinstance(outputs, Mapping) and "preds" in outputs:
        return outputs["preds"]
    message = f"requires a step that returns preds by name, but it returned {describe(outputs)}"
    raise MetricInputsError(setting, message)
