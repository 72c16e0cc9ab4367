"""Arguments of classes: known names, conversion to tensors, and the argument named in errors."""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepwrap.registry import (
    METRICS,
    MODELS,
    OPTIM_WRAPPERS,
    Registry,
    build_tree,
    check_component,
    key_noted_on,
)

PARTS = Registry("parts")


def strict(cls: Any) -> Any:
    """Accept more names, like huggingface_hub's strict dataclasses with `accept_kwargs`."""
    init = cls.__init__

    @wraps(init)
    def any_name(self: Any, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("width",) if name in kwargs}
        init(self, *args, **options)
        vars(self).update(kwargs)

    cls.__init__ = any_name
    return cls


@PARTS.register_module()
@strict
class Strict:
    """A class that declares one argument and accepts all names."""

    def __init__(self, width: int = 1) -> None:
        self.width = width


class _Fields:
    """A class that takes any keyword arguments, like pydantic's models."""

    def __init__(self, /, **data: Any) -> None:
        vars(self).update(data)


@PARTS.register_module()
class Fields(_Fields):
    __signature__ = inspect.signature(Strict)


@PARTS.register_module(name="make")
@wraps(Strict)
def make(**options: Any) -> Any:
    """Build a `Strict` from options as text or numbers."""
    return Strict(**{name: int(value) for name, value in options.items()})


@PARTS.register_module()
class Weighted:
    """A class with tensors, a list and a nested part as arguments."""

    def __init__(
        self,
        weight: Tensor | None = None,
        bounds: Tensor = None,  # type: ignore[assignment]
        steps: Tensor | list[float] | None = None,
        inner: Any = None,
        **more: Any,
    ) -> None:
        self.weight, self.bounds, self.steps, self.inner = weight, bounds, steps, inner
        if more:
            raise ValueError("argument `num_classes` must be an int, got None")
        if weight is not None and len(weight) > 3:
            raise ValueError("'weight' must have at most 3 elements")


def problems(cfg: dict[str, Any], registry: Registry = PARTS) -> list[str]:
    return [f"{problem.key}: {problem.what}" for problem in check_component(cfg, registry, "part")]


@pytest.mark.parametrize("name", ["Strict", "Fields", "make"])
def test_names_that_the_signature_lacks_are_not_refused(name: str) -> None:
    cfg = {"type": name, "num_labels": "3", "width": "2"}
    assert not problems({"type": "Weighted", "inner": cfg})
    built = build_tree({"type": "Weighted", "inner": cfg}, PARTS).inner
    assert vars(built).keys() == {"num_labels", "width"}
    assert PARTS.build({"type": name, "num_labels": 3}).num_labels == 3


def test_a_declared_signature_of_ours_is_complete() -> None:
    cfg = {"type": "AmpOptimWrapper", "dtypes": "float16", "accumulative_counts": "x"}
    unknown, kind = check_component(cfg, OPTIM_WRAPPERS, "w", ["optimizer"])
    assert re.match(r"AmpOptimWrapper .*no such .*mean dtype\?$", unknown.what)
    assert re.search(r"whole number, got 'x' \(AmpOptimWrapper\)$", kind.what)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_settings_of_a_real_config_of_transformers_are_not_refused() -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"type": "transformers.BertConfig", "num_labels": 3, **small}
    model = {"type": "transformers.BertForSequenceClassification", "config": config}
    assert not problems(model, MODELS)
    assert build_tree(model, MODELS).classifier.out_features == 3


def test_lists_of_numbers_become_tensors() -> None:
    loss = build_tree({"type": "CrossEntropyLoss", "weight": [1, 1, 2]}, MODELS)
    assert loss.weight.tolist() == [1.0, 1.0, 2.0]
    assert loss.weight.dtype == torch.float32
    outputs, targets = torch.eye(3), torch.arange(3)
    expected = nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 2.0]))(outputs, targets)
    assert torch.equal(loss(outputs, targets), expected)
    cfg = {"type": "Weighted", "bounds": [[0, 1], [2.5, 3]], "steps": [1, 2], "inner": [1, 2]}
    built = build_tree(cfg, PARTS)
    assert built.bounds.tolist() == [[0.0, 1.0], [2.5, 3.0]]
    assert built.steps == built.inner == [1, 2]
    weight = torch.ones(2, dtype=torch.float64)
    assert build_tree({"type": "Weighted", "weight": weight}, PARTS).weight is weight


@pytest.mark.parametrize(
    ("weight", "got"), [([1, "x"], "[1, 'x']"), ([], "[]"), (3, "3"), ("balanced", "'balanced'")]
)
def test_values_that_cannot_become_a_tensor_are_refused(weight: Any, got: str) -> None:
    cfg = {"type": "SupervisedModel", "net": {"type": "Identity"}}
    cfg["loss"] = {"type": "CrossEntropyLoss", "weight": weight}
    message = f"must be a list of numbers or null, got {got} (CrossEntropyLoss)"
    assert problems(cfg, MODELS) == [f"part.loss.weight: {message}"]


def key_of_failure(cfg: dict[str, Any], registry: Registry = PARTS) -> tuple[str, BaseException]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any type, as it was raised
        build_tree(cfg, registry)
    return key_noted_on(caught.value), caught.value


def nested(entry: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Weighted", "inner": {"list": [None, entry]}}


def test_an_error_knows_its_key() -> None:
    key, error = key_of_failure(nested({"type": "Weighted", "weight": [1, 2, 3, 4]}))
    assert key == "inner.list.1.weight"
    assert str(error) == "'weight' must have at most 3 elements"
    key, error = key_of_failure(nested({"type": "Weighted", "weight": [[1], [1, 2]]}))
    assert key == "inner.list.1.weight"
    assert isinstance(error, ValueError)
    assert key_of_failure(nested({"type": "Gone"}))[0] == "inner.list.1"
    assert key_of_failure({"type": "Linear", "in_features": 1, "out_features": -1}, MODELS)[0] == ""


def test_a_misspelt_argument_is_named_if_only_the_class_knows_it() -> None:
    key, error = key_of_failure(nested({"type": "Weighted", "num_class": 3}))
    assert key == "inner.list.1.num_class"
    assert error.__notes__ == ["did you mean num_classes?"]  # type: ignore[attr-defined]
    accuracy = {"type": "Accuracy", "task": "multiclass", "num_class": 3}
    key, error = key_of_failure(accuracy, METRICS)
    assert key == "num_class"
    assert error.__notes__ == ["did you mean num_classes?"]  # type: ignore[attr-defined]
