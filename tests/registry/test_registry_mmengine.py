"""The documented behaviour of mmengine's Registry, and building from its configs."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwrap.registry import (
    MODELS,
    OPTIMIZERS,
    Registry,
    build_from_cfg,
    build_tree,
    count_registered_modules,
    traverse_registry_tree,
)

Write = Callable[[str, str], Path]


class Backbone:
    def __init__(self, depth: int, inner: Any = None) -> None:
        self.depth, self.inner = depth, inner


class Detector:
    """A model that builds its backbone by the root registry."""

    registry: Registry

    def __init__(self, backbone: Any) -> None:
        self.backbone = self.registry.build(backbone)


class Family:
    """A root, two children and a grandchild; each has a class with its name."""

    def __init__(self) -> None:
        self.root = Registry("model", scope="root")
        self.det = Registry("model", parent=self.root, scope="det")
        self.cls = Registry("model", parent=self.root, scope="cls")
        self.small = Registry("model", parent=self.det, scope="small")
        for registry in (self.root, self.det, self.cls, self.small):
            registry.register_module(name=registry.scope.title(), module=Backbone)


@pytest.fixture
def family() -> Family:
    return Family()


def test_the_tree_is_known_from_each_member(family: Family) -> None:
    assert family.small.root is family.det.root is family.root.root is family.root
    assert family.root.children == {"det": family.det, "cls": family.cls}
    assert family.small.parent is family.det
    assert family.det.scope == "det"
    assert family.det.module_dict == {"Det": Backbone}


def test_scopes_are_split_from_keys_and_inferred_from_the_caller() -> None:
    assert Registry.split_scope_key("mmdet.ResNet") == ("mmdet", "ResNet")
    assert Registry.split_scope_key("mmdet.sub.ResNet") == ("mmdet", "sub.ResNet")
    assert Registry.split_scope_key("ResNet") == (None, "ResNet")
    assert Registry.infer_scope() == __name__
    assert MODELS.infer_scope() == __name__
    assert Registry("model").scope == __name__


def test_switching_yields_the_member_and_builds_from_it(family: Family) -> None:
    with family.cls.switch_scope_and_registry("det") as registry:
        assert registry is family.det
        assert family.root.build({"type": "Det", "depth": 1}).depth == 1
        assert build_from_cfg({"type": "Det", "depth": 2}, family.cls).depth == 2
        with family.cls.switch_scope_and_registry("cls") as inner:
            assert inner is family.cls
            with pytest.raises(KeyError, match="Det .*not in .*cls::model"):
                family.root.build({"type": "Det", "depth": 1})
        with family.root.switch_scope_and_registry(None) as inner:
            assert inner is family.det
    with pytest.raises(KeyError, match="Det .*not in .*root::model"):
        family.root.build({"type": "Det", "depth": 1})
    with family.cls.switch_scope_and_registry(None) as registry:
        assert registry is family.cls


def test_a_registry_without_entries_is_switched_to(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    """The name is then looked up in its ancestors, not in the registry that was left."""
    empty = Registry("model", parent=family.root, scope="empty")
    family.root.register_module(name="X", module=Backbone)
    family.cls.register_module(name="X", module=dict)
    with family.cls.switch_scope_and_registry("empty") as registry:
        assert registry is empty
        assert isinstance(family.cls.build({"type": "X", "depth": 1}), Backbone)
    for build in (build_from_cfg, build_tree):
        assert isinstance(
            build({"type": "X", "_scope_": "empty", "depth": 1}, family.cls), Backbone
        )
    assert not caplog.records


def test_a_switch_ends_with_an_error_too(family: Family) -> None:
    with pytest.raises(RuntimeError), family.root.switch_scope_and_registry("det"):
        raise RuntimeError
    assert "Det" not in family.root
    with pytest.raises(KeyError):
        family.root.build({"type": "Det", "depth": 1})


def test_an_unknown_scope_keeps_the_current_registry(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    with family.det.switch_scope_and_registry("nowhere") as registry:
        assert registry is family.det
        assert family.cls.build({"type": "Cls", "depth": 1}).depth == 1
    assert re.search("model .*no scope 'nowhere': det ", caplog.text)
    caplog.clear()
    assert build_from_cfg({"type": "Det", "_scope_": "no", "depth": 2}, family.det).depth == 2
    assert re.search("model .*no scope 'no': det ", caplog.text)


@pytest.mark.parametrize("cfg", ["Det", None, [{"type": "Det"}]])
def test_a_config_of_another_kind_is_a_type_error(family: Family, cfg: Any) -> None:
    with pytest.raises(TypeError, match="^cfg should be a dict, ConfigDict or Config, but got <c"):
        family.det.build(cfg)


def test_a_grandchild_is_found_by_its_scope_alone(family: Family) -> None:
    with family.cls.switch_scope_and_registry("small") as registry:
        assert registry is family.small
        assert family.cls.build({"type": "Small", "depth": 1}).depth == 1
        assert family.root.build({"type": "Det", "depth": 2}).depth == 2


def test_our_registries_use_mmengines_default_scope(family: Family) -> None:
    default_scope = pytest.importorskip("mmengine.registry").DefaultScope

    def current() -> str | None:
        return getattr(default_scope.get_current_instance(), "scope_name", None)

    before = current()
    with default_scope.overwrite_default_scope("small"):
        assert family.cls.build({"type": "Small", "depth": 1}).depth == 1
    with default_scope.overwrite_default_scope("nowhere"):
        assert family.cls.build({"type": "Cls", "depth": 2}).depth == 2
    with family.cls.switch_scope_and_registry("det"):
        assert current() == "det"
    assert current() == before


def test_global_objects_of_mmengine_are_found_by_their_names(family: Family) -> None:
    mixin = pytest.importorskip("mmengine.utils").ManagerMixin
    kind = family.root.register_module(name="Hub", module=type("Hub", (mixin,), {}))
    built = family.root.build({"type": "Hub", "name": "mine"})
    assert kind.get_instance("mine") is built
    assert built.instance_name == "mine"


@pytest.mark.parametrize("build", [build_from_cfg, build_tree])
def test_a_scope_in_a_config_applies_to_parts_built_by_a_constructor(
    family: Family, build: Callable[..., Any]
) -> None:
    detector = type("Detector", (Detector,), {"registry": family.root})
    family.det.register_module(name="Detector", module=detector)
    backbone = {"_raw_": True, "type": "Det", "depth": 3}
    if build is build_from_cfg:
        del backbone["_raw_"]
    built = build({"type": "Detector", "_scope_": "det", "backbone": backbone}, family.root)
    assert built.backbone.depth == 3


def test_the_tree_is_counted_from_any_member(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counted = traverse_registry_tree(family.small)
    assert [(count["scope"], count["num_modules"]) for count in counted] == [
        ("root", 1),
        ("det", 1),
        ("small", 1),
        ("cls", 1),
    ]
    assert counted[1][""] == ["Det"]
    assert "model of det has 1 registered" in caplog.text
    caplog.clear()
    assert traverse_registry_tree(family.root, verbose=False) == counted
    assert not caplog.text


def test_all_registries_are_counted_and_saved(tmp_path: Path) -> None:
    counted = count_registered_modules(tmp_path, verbose=False)
    hooks = counted["registries"]["HOOKS"][0]
    assert hooks["scope"] == "stepwrap"
    assert "CheckpointHook" in hooks["stepwrap/loops/hooks"]
    assert json.loads((tmp_path / "modules_statistic_results.json").read_text()) == counted
    assert set(count_registered_modules()) == {"scan_date", "registries"}


@pytest.fixture
def mmengine_config() -> Any:
    return pytest.importorskip("mmengine.config")


def test_configs_of_mmengine_are_built(family: Family, mmengine_config: Any) -> None:
    section = {"type": "Root", "depth": 3, "inner": {"a": [1, {"b": 2}]}}
    for kind in (mmengine_config.Config, mmengine_config.ConfigDict):
        cfg = kind(section)
        built = family.root.build(cfg)
        assert (built.depth, built.inner.a[1].b) == (3, 2)
        defaults = kind({"type": "Det", "depth": 1})
        assert build_from_cfg(kind({"depth": 2}), family.det, defaults).depth == 2
        assert build_tree(cfg, family.root).depth == 3
        assert cfg.type == "Root"
        with pytest.raises(KeyError, match='must contain the key "type", but got depth'):
            family.root.build(kind({"depth": 3}))
        with pytest.raises(TypeError, match="dept: Backbone .*no such argument"):
            family.root.build(kind({"type": "Root", "dept": 3}))
        assert build_from_cfg(kind({"type": "Det", "_scope_": "det", "depth": 4}), family.cls)


def test_models_of_mmengines_config_files_are_built(write: Write, mmengine_config: Any) -> None:
    text = write("base.py", "model = dict(type='Linear', in_features=2, out_features=3)\n")
    child = write("child.py", "_base_ = './base.py'\nmodel = dict(out_features=4, bias=False)\n")
    assert MODELS.build(mmengine_config.Config.fromfile(str(text)).model).weight.shape == (3, 2)
    built = MODELS.build(mmengine_config.Config.fromfile(str(child)).model)
    assert built.weight.shape == (4, 2)
    assert built.bias is None
    layers = mmengine_config.ConfigDict(layers=[{"type": "ReLU"}, {"type": "Tanh"}]).layers
    assert [type(layer).__name__ for layer in MODELS.build(layers)] == ["ReLU", "Tanh"]


def test_types_that_a_config_imports_lazily_are_the_classes(
    write: Write, mmengine_config: Any
) -> None:
    lazy = "from torch.optim import SGD\noptimizer = dict(type=SGD, lr=0.5)\n"
    cfg = mmengine_config.Config.fromfile(str(write("lazy.py", lazy)), lazy_import=True)
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    built = OPTIMIZERS.build(cfg.optimizer, default_args={"params": parameters})
    assert built.param_groups[0]["lr"] == 0.5


def test_the_registry_imports_no_mmengine() -> None:
    script = "import sys, stepwrap.registry; sys.exit('mmengine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
