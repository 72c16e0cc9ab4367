"""The outputs of a step that a metric gets: of one head, or changed by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...registry import did_you_mean
from ..error_notes import add_note, describe, name_of


class MetricInputsError(ValueError):
    """Raised if the step's outputs do not have what ``MetricInputs`` selects.

    Attributes:
        setting: The key path of the setting in a config, such as "metrics.error.head".
    """

    def __init__(self, setting: str, text: str) -> None:
        super().__init__(setting, text)
        self.setting = setting
        self.text = text

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}"


@dataclass(frozen=True)
class MetricInputs:
    """A metric with a selection of what it gets.

    Attributes:
        metric: A metric of torchmetrics, or a ``BaseMetric``.
        head: A key of ``preds``, if the step returns predictions by head: the metric gets
            ``preds[head]``. Every other output that is a mapping with this key, such as ``target``,
            is replaced by its entry in the same way.
        transform: A function that is called with ``preds``, after the selection of the head. The
            metric gets what it returns. If the step does not return a mapping, it is called with
            the step's result.
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
            outputs = self._of_head(f"metrics.{name}.head", self.head, outputs)
        if self.transform is None:
            return outputs
        if not isinstance(outputs, Mapping):
            return self._transformed(name, outputs)
        preds = _preds_of(outputs, f"metrics.{name}.transform")
        return {**outputs, "preds": self._transformed(name, preds)}

    def _of_head(self, setting: str, head: str, outputs: Any) -> dict[str, Any]:
        heads = _preds_of(outputs, setting)
        if not isinstance(heads, Mapping):
            what = f"requires predictions by head, but preds is {describe(heads)}"
            raise MetricInputsError(setting, what)
        if head not in heads:
            what = f"preds has no head {head!r}{did_you_mean(head, map(str, heads))}"
            raise MetricInputsError(setting, f"{what}; the heads are: {', '.join(map(str, heads))}")
        return {
            key: value[head] if isinstance(value, Mapping) and head in value else value
            for key, value in outputs.items()
        }

    def _transformed(self, name: str, preds: Any) -> Any:
        assert self.transform is not None
        try:
            return self.transform(preds)
        except Exception as error:
            function = name_of(self.transform)
            text = f"in transform {function} of metric {name!r}, which was given {describe(preds)}"
            add_note(error, text)
            raise


def _preds_of(outputs: Any, setting: str) -> Any:
    if isinstance(outputs, Mapping) and "preds" in outputs:
        return outputs["preds"]
    what = f"requires a step that returns preds by name, but it returned {describe(outputs)}"
    raise MetricInputsError(setting, what)
