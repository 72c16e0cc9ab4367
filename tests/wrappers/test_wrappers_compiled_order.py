"""A compiled step after the keys of dicts have changed their order, and after a reset of state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_runs import (
    CHANGED_AT,
    Net,
    adamw,
    assert_same,
    at,
    batch_at,
    clear_state,
    sgd,
    steps_compiled,
)
from marks import slow
from torch import Tensor, nn


class Views(nn.Module):
    """A model whose loss weighs inputs by their position."""

    losses = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *, y: Tensor, mode: str, **views: Tensor) -> dict[str, Tensor]:
        outputs = sum((1 + at) * self.net(view) for at, view in enumerate(views.values()))
        return {"loss": nn.functional.cross_entropy(outputs, y)}  # type: ignore[arg-type]


class NestedViews(Views):
    def forward(self, views: Any, y: Tensor, mode: str) -> dict[str, Tensor]:
        return super().forward(y=y, mode=mode, **views)


class ListedViews(Views):
    def forward(self, views: Any, y: Tensor, mode: str) -> dict[str, Tensor]:
        return super().forward(y=y, mode=mode, **({} | views[0]["of"]))


@dataclasses.dataclass
class Scales:
    by_name: dict[str, float]


class ScaledViews(Views):
    def forward(self, x: Tensor, scales: Scales, y: Tensor, mode: str) -> dict[str, Tensor]:
        factor = 1.0
        for position, scale in enumerate({**scales.by_name}.values()):
            factor *= 1 + position * scale
        return super().forward(y=y, mode=mode, x=x * factor)


class OwnScales(ScaledViews):
    """A model with the scales in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net.scales = {"p": 1.0, "q": 3.0}  # type: ignore[assignment]

    def forward(self, x: Tensor, y: Tensor, mode: str) -> dict[str, Tensor]:  # type: ignore[override]
        scales: Any = self.net.scales
        return super().forward(x, Scales(scales), y, mode)


BATCHES: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "flat": (Views, lambda p, q, y: {"p": p, "q": q, "y": y}),
    "nested": (NestedViews, lambda p, q, y: {"views": {"p": p, "q": q}, "y": y}),
    "tuple": (NestedViews, lambda p, q, y: ({"p": p, "q": q}, y)),
    "list": (ListedViews, lambda p, q, y: {"views": [{"of": {"p": p, "q": q}}], "y": y}),
    "dataclass": (ScaledViews, lambda p, q, y: (p, Scales({"p": 1.0, "q": 3.0}), y)),
}


def turned(value: Any) -> Any:
    """Return ``value`` with all dicts in the reverse order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    if isinstance(value, Scales):
        return Scales(turned(value.by_name))
    return type(value)(map(turned, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", ["flat", "nested", *slow("tuple", "list", "dataclass")])
def test_batches_with_their_keys_in_another_order(kind: str) -> None:
    model, build = BATCHES[kind]

    def make_batch(index: int, dtype: torch.dtype) -> Any:
        x, y = batch_at(index, dtype)
        batch = build(x, batch_at(-index, dtype)[0], y)
        return turned(batch) if index >= CHANGED_AT and index % 2 else batch

    wrapper = assert_same(1e-10, model, sgd, make_batch=make_batch)
    assert len(wrapper.batch_runner.programs) == 2
    assert steps_compiled(wrapper) > CHANGED_AT


@pytest.mark.parametrize("in_place", [True, *slow(False)])
def test_attributes_with_their_keys_in_another_order(in_place: bool) -> None:
    def turn(model: Any, _: Any) -> None:
        scales = turned(model.net.scales)
        if in_place:
            model.net.scales.clear()
            model.net.scales.update(scales)
        else:
            model.net.scales = scales

    wrapper = assert_same(1e-10, OwnScales, sgd, at({CHANGED_AT: turn}))
    assert len(wrapper.batch_runner.programs) == 2


def test_a_reset_of_the_state_is_not_reported_as_the_end_of_compiling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resets = dict.fromkeys((8, 14), clear_state)
    wrapper = assert_same(1e-10, Net, adamw, at(resets), max_programs=8)
    assert len(wrapper.batch_runner.programs) == 1 + len(resets)
    assert "not compiled" not in caplog.text
