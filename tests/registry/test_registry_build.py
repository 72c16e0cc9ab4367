"""Build objects from dicts."""

import copy
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from stepwrap.registry import (
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    Registry,
    build_from_cfg,
    build_model_from_cfg,
    build_tree,
    check_component,
    supply_where_taken,
)


class Part:
    def __init__(self, width: int, depth: int = 2, inner: Any = None) -> None:
        if width < 0:
            raise ValueError("width must not be negative")
        self.width, self.depth, self.inner = width, depth, inner


@pytest.fixture
def parts() -> Registry:
    registry = Registry("PARTS", scope="parts")
    registry.register_module(module=Part)
    return registry


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_the_input_is_not_changed_and_wins_over_defaults(parts: Registry) -> None:
    cfg, defaults = {"type": "Part", "width": 3}, {"width": 1, "depth": 5}
    copies = copy.deepcopy((cfg, defaults))
    built = build_from_cfg(cfg, parts, defaults)
    assert (built.width, built.depth) == (3, 5)
    assert (cfg, defaults) == copies


@pytest.mark.parametrize("kind", ["Part", Part, f"{__name__}.Part"])
def test_type_is_a_name_a_path_or_the_class(parts: Registry, kind: Any) -> None:
    assert isinstance(parts.build({"type": kind, "width": 1}), Part)
    assert isinstance(parts.build({"width": 1}, default_args={"type": kind}), Part)


def test_nested_dicts_are_passed_unchanged(parts: Registry) -> None:
    inner = {"type": "Part", "width": 1}
    assert parts.build({"type": "Part", "width": 1, "inner": inner}).inner is inner


@pytest.mark.parametrize(
    ("cfg", "kind", "said"),
    [
        ([{"type": "Part"}], TypeError, "but got"),
        ("Part", TypeError, "but got"),
        (None, TypeError, "but got"),
        ({"type": 3}, TypeError, "but got"),
        ({"width": 1}, KeyError, 'must contain the key "type", but got width'),
        ({"type": "Part", "width": -1}, ValueError, "^width must not be negative$"),
    ],
)
def test_wrong_configs(parts: Registry, cfg: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        build_from_cfg(cfg, parts)


def test_wrong_registry_and_defaults_are_type_errors(parts: Registry) -> None:
    cfg: Any = {"type": "Part"}
    with pytest.raises(TypeError, match="registry must .*Registry .*<class 'dict'>"):
        build_from_cfg(cfg, cfg)
    with pytest.raises(TypeError, match="^default_args should be a dict, ConfigDict, Config or N"):
        build_from_cfg(cfg, parts, [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"widht": 1}, "widht: Part has no such argument; did you mean width?"),
        ({"width": 1, "zz": 1}, "zz: Part has no such argument; it also takes depth, inner"),
        ({}, "width: is missing, Part needs it"),
        ({"zz": 1}, "zz: Part has no such argument; it also takes width, depth, inner; width: is"),
    ],
)
def test_wrong_arguments_name_class_and_signature(
    parts: Registry, cfg: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        parts.build({"type": "Part", **cfg})
    assert str(caught.value).startswith(said)
    assert "Part(width, depth=2, inner=None)" in str(caught.value)


def test_a_misspelt_argument_hides_the_missing_one(parts: Registry) -> None:
    with pytest.raises(TypeError) as caught:
        parts.build({"type": "Part", "widht": 1})
    assert "missing" not in str(caught.value)


def test_build_func_is_own_or_the_parents() -> None:
    def make(cfg: dict[str, Any], registry: Registry, extra: int = 0) -> Any:
        return cfg, registry, extra

    root = Registry("root", build_func=make, scope="a")
    child = Registry("child", parent=root, scope="b")
    assert child.build({"x": 1}, extra=3) == ({"x": 1}, child, 3)


def test_scope_key_switches_the_registry(parts: Registry) -> None:
    child = Registry("PARTS", parent=parts, scope="child")
    child.register_module(name="Part", module=dict)
    assert parts.build({"type": "Part", "_scope_": "child"}) == {}
    assert isinstance(child.build({"type": "Part", "_scope_": "parts", "width": 1}), Part)
    with pytest.raises(KeyError, match="no scope 'cat'.*parts, child"):
        build_tree({"type": "Part", "_scope_": "cat"}, parts)


def test_trees_are_built_inside_out() -> None:
    cfg = {
        "type": "SupervisedModel",
        "net": {"type": "Linear", "in_features": 2, "out_features": 3},
        "loss": {"type": "torch.nn.CrossEntropyLoss"},
    }
    before = copy.deepcopy(cfg)
    model = build_tree(cfg, MODELS)
    assert isinstance(model.net, nn.Linear)
    assert cfg == before


def test_nested_types_fall_back_to_models(parts: Registry) -> None:
    built = build_tree({"type": "Part", "width": 1, "inner": [{"a": {"type": "ReLU"}}, 3]}, parts)
    assert isinstance(built.inner[0]["a"], nn.ReLU)
    assert built.inner[1] == 3


def test_references_and_raw_dicts(parts: Registry) -> None:
    raw = {"_raw_": True, "type": "Part", "x": 1}
    built = build_tree({"type": "Part", "width": {"_ref_": "math.pi"}, "inner": raw}, parts)
    assert built.inner == {"type": "Part", "x": 1}
    assert built.width == pytest.approx(3.14159, abs=1e-5)
    built = build_tree({"type": "Part", "width": 1, "inner": {"_ref_": "ReLU"}}, parts)
    assert built.inner is nn.ReLU


def test_nested_schedulers_get_the_optimizer() -> None:
    optimizer = OPTIMIZERS.build({"type": "SGD", "lr": 1.0}, default_args={"params": parameters()})
    cfg = {
        "type": "SequentialLR",
        "schedulers": [{"type": "LinearLR"}, {"type": "CosineAnnealingLR", "T_max": 3}],
        "milestones": [1],
    }
    assert check_component(cfg, PARAM_SCHEDULERS, "s", ["optimizer"]) == []
    scheduler = build_tree(cfg, PARAM_SCHEDULERS, {"optimizer": optimizer})
    assert scheduler.optimizer is optimizer


def test_a_nested_miss_names_both_registries(parts: Registry) -> None:
    with pytest.raises(KeyError) as caught:
        build_tree({"type": "Part", "width": 1, "inner": {"type": "Liner"}}, parts)
    text = str(caught.value)
    assert re.search("Liner .*not in .*parts::PARTS", text)
    assert "MODELS; did you mean Linear" in text


@pytest.mark.parametrize(
    ("cfg", "key", "said"),
    [
        ("ddp", "w", "must be a dict with a type, got 'ddp'; write {type: ddp}"),
        ({"module": 1}, "w", "needs a type: a name of MODEL_WRAPPERS or an import path"),
        ({"type": 3}, "w.type", "type must be a str or valid type, but got <class 'int'>: 3"),
        ({"type": "ddp", "module": 1}, "w.module", "is supplied by the run"),
        (
            {"type": "ddp", "find_unused": True},
            "w.find_unused",
            "StepDistributedDataParallel has no such argument; did you mean find_unused_para",
        ),
        ({"type": "single", "module": {"type": "Liner"}}, "w.module.type", "Liner is not in"),
        ({"type": "single", "module": {"_ref_": "no.x"}}, "w.module._ref_", "package no is not"),
    ],
)
def test_components_are_checked_without_building(cfg: Any, key: str, said: str) -> None:
    problems = check_component(cfg, MODEL_WRAPPERS, "w", ["module"])
    assert any(problem.key == key and said in problem.what for problem in problems)


def test_names_close_to_passed_through_arguments_are_reported() -> None:
    (problem,) = check_component({"type": "AUROC", "tasks": "binary"}, METRICS, "m")
    assert problem.key == "m.task"
    assert "tasks a misspelling" in problem.what


def test_a_list_of_models_is_a_sequential() -> None:
    layers = [{"type": "Linear", "in_features": 2, "out_features": 3}, {"type": "ReLU"}]
    built = MODELS.build(layers)
    assert [type(layer).__name__ for layer in built] == ["Linear", "ReLU"]
    assert built(torch.ones(1, 2)).shape == (1, 3)
    assert build_model_from_cfg(layers[1], MODELS)(torch.tensor(-1.0)) == 0


class Typed:
    def __init__(
        self,
        rate: float | torch.Tensor = 0.1,
        count: int | None = None,
        *,
        flag: bool = False,
        mode: Literal["min", "max"] = "min",
        any_of: Any = None,
        path: Path | str = "",
        pair: tuple[int, int] | int = 1,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rate", "fast", "must be a number, got 'fast' (Typed)"),
        ("rate", True, "must be a number, got true (Typed)"),
        ("count", "many", "must be a whole number, got 'many' (Typed)"),
        ("count", 1.5, "must be a whole number, got 1.5 (Typed)"),
        ("flag", 3, "must be true or false, got 3 (Typed)"),
        ("mode", "mix", "must be min or max, got 'mix' (Typed)"),
    ],
)
def test_values_of_the_wrong_type_are_reported(name: str, value: Any, said: str) -> None:
    (problem,) = check_component({"type": Typed, name: value}, MODELS, "m")
    assert (problem.key, problem.what) == (f"m.{name}", said)


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 1, "count": None, "flag": True, "mode": "max"},
        {"count": 1e3},
        {"any_of": "x", "path": "there", "pair": "seven"},
    ],
)
def test_values_that_may_be_right_pass(values: dict[str, Any]) -> None:
    assert check_component({"type": Typed, **values}, MODELS, "m") == []


class Team:
    def __init__(self, parts: object = None, process_group: object = None) -> None:
        self.parts, self.process_group = parts, process_group


class Lone:
    config_plain = ("table",)

    def __init__(self, part: object = None, table: object = None) -> None:
        self.part, self.table = part, table


def test_an_argument_is_supplied_if_it_is_accepted() -> None:
    group = object()
    inner = {"type": Team, "process_group": 3}
    raw = {"_raw_": True, "type": Team}
    cfg = {"type": Lone, "part": {"type": Team, "parts": [inner, {"deep": {"type": Team}}, raw]}}
    filled = supply_where_taken({**cfg, "table": {"type": Team}}, MODELS, "process_group", group)
    built = build_tree(filled, MODELS)
    assert built.table == {"type": Team}
    assert built.part.process_group is group
    team, second, third = built.part.parts
    assert team.process_group == 3
    assert second["deep"].process_group is group
    assert third == {"type": Team}


def test_the_mark_of_plain_dicts_is_removed() -> None:
    marked = {"type": Lone, "table": {"_raw_": True, "type": "value"}}
    assert check_component(marked, MODELS, "model") == []
    assert build_tree(marked, MODELS).table == {"type": "value"}
