"""Registering and looking up names."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwrap.registry import (
    DATASETS,
    HOOKS,
    METRICS,
    MODEL_WRAPPERS,
    MODELS,
    OPTIMIZERS,
    Registry,
    build_tree,
    import_path,
)

Write = Callable[[str, str], Path]


class Thing:
    """A registered class."""


class Other:
    """Another registered class."""


def miss(registry: Registry, key: str) -> str:
    with pytest.raises(KeyError) as caught:
        registry.resolve(key)
    return str(caught.value)


@pytest.fixture
def family() -> dict[str, Registry]:
    """A root with two children and two grandchildren."""
    root = Registry("animals", scope="root")
    hound = Registry("animals", parent=root, scope="hound")
    samoyed = Registry("animals", parent=root, scope="samoyed")
    members = {
        "root": root,
        "hound": hound,
        "samoyed": samoyed,
        "little_hound": Registry("animals", parent=hound, scope="little_hound"),
        "little_samoyed": Registry("animals", parent=samoyed, scope="little_samoyed"),
    }
    for scope, registry in members.items():
        registry.register_module(name=f"In_{scope}", module=type(scope, (), {}))
    return members


def test_decorator_and_direct_call_return_the_object() -> None:
    registry = Registry("things")
    assert registry.register_module()(Thing) is Thing
    assert registry.register_module(name=["a", "b"], module=Other) is Other
    assert list(registry) == ["Thing", "a", "b"]
    assert len(registry) == 3
    assert registry.get("b") is Other
    assert "a" in registry
    assert "c" not in registry


def test_functions_are_registered_too() -> None:
    registry = Registry("things")

    @registry.register_module()
    def make() -> int:
        return 3

    assert registry.build({"type": "make"}) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"force": 1}, "force must be a boolean, but got <class 'int'>: 1"),
        ({"name": 3}, "name must be None, an instance of str, or a sequence of str, but got <cl"),
        ({"name": [1]}, "name must be None, an instance of str, or a sequence of str, but got <"),
        ({"module": 3}, "module must be Callable, but got <class 'int'>: 3"),
        ({"name": "x", "module": "Thing"}, "module must be Callable, but got <class 'str'>"),
    ],
)
def test_wrong_registrations_are_type_errors(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        Registry("things").register_module(**arguments)
    assert str(caught.value).startswith(said)


def test_repr_is_a_table_of_the_registered_names() -> None:
    registry = Registry("things")
    registry.register_module(name="Other", module=Other)
    registry.register_module(name="[bold]", module=Thing)
    title, *_, row, second, _ = repr(registry).splitlines()
    assert title.strip() == "Registry of things"
    assert [cell.strip() for cell in row.split("│")[1:3]] == ["Other", str(Other)]
    assert [cell.strip() for cell in second.split("│")[1:3]] == ["[bold]", str(Thing)]


def test_a_taken_name_needs_force() -> None:
    registry = Registry("things")
    registry.register_module(module=Thing)
    with pytest.raises(KeyError, match=f"Thing .*registered .*things at {__name__}"):
        registry.register_module(name="Thing", module=Other)
    registry.register_module(name="Thing", force=True, module=Other)
    assert registry.get("Thing") is Other


def test_several_names_are_registered_together_or_not_at_all() -> None:
    registry = Registry("things")
    registry.register_module(module=Thing)
    with pytest.raises(KeyError, match="Thing is already registered"):
        registry.register_module(["fresh", "Thing"], module=Other)
    assert registry.module_dict == {"Thing": Thing}
    registry.register_module(["fresh", "Thing"], force=True, module=Other)
    assert registry.module_dict == {"Thing": Other, "fresh": Other}


def test_a_module_that_failed_half_way_keeps_its_own_error(write: Write) -> None:
    text = (
        "from stepwrap.registry import MODELS\n@MODELS.register_module()\nclass Half: ...\n1 / 0\n"
    )
    write("half.py", text)
    for _ in range(2):
        assert "half cannot be imported: ZeroDivisionError" in miss(MODELS, "half.Whole")
    write("half.py", text.replace("1 / 0", ""))
    assert MODELS.get("half.Half") is MODELS.get("Half") is sys.modules["half"].Half
    MODELS.module_dict.pop("Half")


def test_aliases_are_further_names_of_an_entry() -> None:
    registry = Registry("things", aliases={"Old": "Thing"})
    assert registry.get("Old") is None
    registry.register_module(module=Thing)
    assert registry.get("Old") is Thing
    assert registry.names() == ["Old", "Thing"]


def test_scope_is_the_package_that_creates_the_registry() -> None:
    assert MODELS.scope == "stepwrap"
    assert Registry("things").scope == __name__.partition(".")[0]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"scope": 1}, AssertionError, "scope must be a str, but got <class 'int'>: 1"),
        ({"scope": "a.b"}, ValueError, "scope must be a name without dots, got 'a.b'"),
        ({"scope": ""}, ValueError, "scope must be a name without dots, got ''"),
        ({"parent": "x"}, AssertionError, "parent must be a Registry or None, but got <class 's"),
        ({"parent": Registry}, AssertionError, "parent must be a Registry or None, but got"),
    ],
)
def test_wrong_scopes_and_parents_are_refused_at_once(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        Registry("things", **options)


def test_a_refused_registry_is_not_added_to_its_parent(family: dict[str, Registry]) -> None:
    with pytest.raises(ValueError, match="without dots"):
        Registry("animals", parent=family["root"], scope="a.b")
    assert set(family["root"].children) == {"hound", "samoyed"}


def test_children_need_different_scopes(family: dict[str, Registry]) -> None:
    with pytest.raises(AssertionError, match="hound"):
        Registry("animals", parent=family["root"], scope="hound")


@pytest.mark.parametrize(
    ("asker", "key", "found_in"),
    [
        ("hound", "In_hound", "hound"),
        ("hound", "hound.In_hound", "hound"),
        ("hound", "In_root", "root"),
        ("little_hound", "In_root", "root"),
        ("root", "hound.In_hound", "hound"),
        ("root", "hound.little_hound.In_little_hound", "little_hound"),
        ("hound", "little_hound.In_little_hound", "little_hound"),
        ("hound", "root.In_root", "root"),
        ("hound", "samoyed.In_samoyed", "samoyed"),
        ("little_hound", "samoyed.In_samoyed", "samoyed"),
        ("little_hound", "samoyed.little_samoyed.In_little_samoyed", "little_samoyed"),
        ("samoyed", "hound.little_hound.In_little_hound", "little_hound"),
        ("root", "In_hound", None),
        ("hound", "In_samoyed", None),
        ("hound", "hound.In_root", None),
        ("hound", "samoyed.In_hound", None),
        ("samoyed", "little_hound.In_little_hound", None),
        ("root", "cat.In_root", None),
    ],
)
def test_family_tree(
    family: dict[str, Registry], asker: str, key: str, found_in: str | None
) -> None:
    """Parent, child, sibling, uncle, cousin and nephew; a missing name gives None."""
    expected = None if found_in is None else family[found_in].module_dict[f"In_{found_in}"]
    assert family[asker].get(key) is expected


def test_only_text_is_looked_up() -> None:
    with pytest.raises(TypeError, match="^The key argument of `Registry.get` must be a str, got"):
        MODELS.get(Thing)  # type: ignore[arg-type]


def test_import_paths_and_namespaces() -> None:
    assert OPTIMIZERS.get("torch.optim.SGD") is torch.optim.SGD
    assert OPTIMIZERS.get("SGD") is torch.optim.SGD
    assert MODELS.get("torch.nn.Module.train") is torch.nn.Module.train
    assert MODELS.get("torch.float32") is None
    assert OPTIMIZERS.get("lr_scheduler") is None


def test_documented_names_are_aliases() -> None:
    wrapper = MODEL_WRAPPERS.get("StepDistributedDataParallel")
    assert wrapper is not None
    assert MODEL_WRAPPERS.get("MMDistributedDataParallel") is wrapper
    assert MODEL_WRAPPERS.get("ddp") is wrapper


def test_registered_names_come_before_namespaces() -> None:
    registry = Registry("optimizers", namespaces=("torch.optim",))
    registry.register_module(name="SGD", module=Thing)
    assert registry.get("SGD") is Thing


def test_locations_are_imported_at_the_first_miss(write: Write) -> None:
    write("late.py", "from holder import THINGS\nTHINGS.register_module(module=dict, name='D')\n")
    holder = "from stepwrap.registry import Registry\nTHINGS = Registry('t', locations=['late'])\n"
    write("holder.py", holder)
    from holder import THINGS  # type: ignore[import-not-found]

    assert "late" not in sys.modules
    assert THINGS.get("D") is dict
    assert list(THINGS) == ["D"]


def test_a_broken_location_is_reported_with_its_error(write: Write) -> None:
    write("broken.py", "import sys\nsys.exit('no licence')\n")
    registry = Registry("things", locations=["broken", "absent"])
    assert registry.get("Thing") is None
    text = miss(registry, "Thing")
    assert re.search("broken .*import: SystemExit: no licence", text)
    assert re.search("absent .*import: ModuleNotFoundError: .*'absent'", text)


@pytest.mark.parametrize(
    ("registry", "key", "said"),
    [
        (OPTIMIZERS, "AdamX", "AdamX is not in the stepwrap::OPTIMIZERS registry; did you"),
        (METRICS, "Acuracy", "did you mean Accuracy"),
        (MODELS, "mmdet.RetinaNet", "package mmdet is not installed; if it is your code, run this"),
        (MODELS, "mmdet.RetinaNet", "from the folder that contains mmdet.py"),
        (MODELS, "mmdet.nets.RetinaNet", "from the folder that contains mmdet/"),
        (MODELS, "torch.nn.Linearr", "torch.nn has no Linearr; did you mean Linear"),
        (MODELS, "torch.nnn.Linear", "torch has no nnn; did you mean nn"),
        (MODELS, "torch.float32", "neither a class nor a function"),
        (HOOKS, "nonsense", "it has CheckpointHook"),
    ],
)
def test_errors_of_failed_lookups(registry: Registry, key: str, said: str) -> None:
    assert said in miss(registry, key)


@pytest.mark.parametrize("name", ["determinism", "functional", "SequentialSample", "net"])
def test_only_similar_names_of_the_right_kind_are_suggested(name: str) -> None:
    """torch.utils.data also has samplers, and names that contain others by chance."""
    with pytest.raises(KeyError) as caught:
        build_tree({"type": "SupervisedModel", "net": {"type": name}, "loss": None}, MODELS)
    assert "did you mean" not in str(caught.value).partition("DATASETS")[2]
    assert "ampler" not in miss(DATASETS, name).partition("registry")[2]
    assert "guaranteed" not in miss(DATASETS, name).partition("registry")[2]


def test_a_miss_names_the_scopes_and_the_relative_that_has_it(
    family: dict[str, Registry],
) -> None:
    text = miss(family["hound"], "In_samoyed")
    assert "hound, root, little_hound, samoyed, little_samoyed)" in text
    assert "did you mean samoyed.In_samoyed" in text


def test_a_failing_module_is_reported_with_its_error(write: Write) -> None:
    write("faulty.py", "import nothing_like_this\n")
    text = miss(MODELS, "faulty.Net")
    assert re.search("faulty .*imported: ModuleNotFoundError: .*'nothing_like_this'", text)


def test_a_definition_that_was_never_imported_is_found(write: Write) -> None:
    decorated = "\n@MODELS.register_module()\nclass Seen:\n    pass\n"
    write("zoo/models.py", decorated + "class Plain:\n    pass\n")
    write(".venv/models.py", decorated)
    write("env2/pyvenv.cfg", "")
    write("env2/models.py", decorated)
    write("odd.py", "class Seen(:\n")
    unseen, plain = miss(MODELS, "Seen"), miss(MODELS, "other.Plain")
    where = str(Path("zoo/models.py"))
    location = rf"Seen .*{where}:3 .*never imported: add zoo\.models to imports$"
    assert re.search(location, unseen)
    assert re.search(rf"{where}:5 .*never imported: .*type: zoo\.models\.Plain$", plain)


def test_few_definitions_are_proposed_and_each_can_be_imported(write: Write) -> None:
    paths = ["my-zoo/a.py", "2.py", "json/a.py", "torch/a.py", "torch.py", "a/b/c/d/far.py"]
    importable = ["near_1", "near_2.a", "near_2.b", "near_3.a"]
    for path in (*paths, *(f"{name.replace('.', '/')}.py" for name in importable)):
        write(path, "class Lion:\n    pass\n")
    text = miss(MODELS, "Lion")
    proposed = re.findall(r"write type: ([\w.]+)", text)
    assert proposed == [f"{name}.Lion" for name in importable[:3]]
    assert all(import_path(name).__name__ == "Lion" for name in proposed)
    assert not re.search("json|torch|zoo", text.partition("registry")[2])


def test_the_search_for_definitions_is_bounded(write: Write) -> None:
    for number in range(1_000):
        write(f"many/m{number}.py", "")
    write("many/z.py", "class Tiger:\n    pass\n")
    write("z.py", "class Puma:\n    pass\n")
    assert "is defined" not in miss(MODELS, "Tiger")
    assert "write type: z.Puma" in miss(MODELS, "Puma")


def test_a_definition_that_is_not_registered_is_named_by_its_path(write: Write) -> None:
    write("imported_shapes.py", "class Square:\n    pass\n")
    __import__("imported_shapes")
    text = miss(MODELS, "Square")
    where = r"imported_shapes\.py:1 .*not registered .*type: imported_shapes\.Square"
    assert re.search(where, text)
