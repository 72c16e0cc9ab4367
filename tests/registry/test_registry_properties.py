"""Properties that hold for any config, override and name."""

import importlib.util
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stepwrap.registry import (
    ConfigError,
    Registry,
    build_from_cfg,
    dump_config,
    format_config,
    load_config,
)

shared_folder = settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

names = st.text(string.ascii_letters + "_", min_size=1, max_size=6).filter(
    lambda name: name not in {"_base_", "_delete_", "imports", "name"}
)
text = st.one_of(
    st.text(max_size=12),
    st.text("\\${}:a. ", max_size=12),
    st.sampled_from(
        ["1e-3", "on", "null", "~", "2020-01-01", "0x1", "1:30", "<<", "=", "a: b", "#"]
    ),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), text
).filter(lambda value: value != "???")
keys = st.one_of(names, st.integers(0, 99), text.filter(lambda key: key not in {"_delete_"}))


def trees(key_strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    values = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(key_strategy, inner, max_size=3)
        ),
        max_leaves=8,
    )
    return st.dictionaries(names, values, max_size=5)


def has_distinct_keys(tree: Any) -> bool:
    """Return whether no mapping has both 1 and "1", which have the same key path."""
    if isinstance(tree, dict):
        inner = all(has_distinct_keys(value) for value in tree.values())
        return inner and len({str(key) for key in tree}) == len(tree) and "_base_" not in tree
    return not isinstance(tree, list) or all(has_distinct_keys(entry) for entry in tree)


@shared_folder
@given(tree=trees(keys).filter(has_distinct_keys))
@example(tree={"a": "\\${b}", "b": "\\\\${", "c": "${a}\\", "d": "x\\\\", "e": "$${x}"})
def test_dumped_dicts_load_unchanged(tree: dict[Any, Any], tmp_path: Path) -> None:
    dump_config(tree, tmp_path / "a.yaml")
    loaded = load_config(tmp_path / "a.yaml")
    assert loaded.to_dict() == {**tree, "name": "a"}
    dump_config(loaded, tmp_path / "b.yaml")
    assert load_config(tmp_path / "b.yaml") == loaded


@shared_folder
@given(tree=trees(names), path=st.lists(names, min_size=1, max_size=3), value=st.integers())
def test_an_override_sets_exactly_its_path(
    tree: dict[str, Any], path: list[str], value: int, tmp_path: Path
) -> None:
    dump_config(tree, tmp_path / "a.yaml")
    before = load_config(tmp_path / "a.yaml").to_dict()
    override = f"{'.'.join(path)}={value}"
    try:
        loaded = load_config(tmp_path / "a.yaml", [override])
    except ConfigError as error:
        assert override in str(error)  # noqa: PT017
        return
    expected = before
    for key in path[:-1]:
        if expected.get(key) is None:
            expected[key] = {}
        expected = expected[key]
    expected[path[-1]] = value
    assert loaded.to_dict() == before
    assert loaded.origin(".".join(path)) == f"override {override}"


SETTINGS = ("seed", "optimizer.lr", "optimizer.kind", "stages")


@st.composite
def families(draw: st.DrawFn) -> list[tuple[list[int], dict[str, Any]]]:
    """Draw files: for each, the numbers of earlier files that it is based on, and its settings."""
    files = []
    for number in range(draw(st.integers(3, 6))):
        bases = (
            draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else []
        )
        attributes = draw(st.lists(st.sampled_from(SETTINGS), unique=True, max_size=3))
        value = 10 * number + 1
        files.append((bases, {key: [value] if key == "stages" else value for key in attributes}))
    return files


@shared_folder
@given(files=families())
@example(files=[([], dict.fromkeys(SETTINGS, 0)), ([0], {"seed": 1}), ([0], {}), ([1, 2], {})])
@example(files=[([], {}), ([0], {}), ([1, 0], {}), ([2], {"seed": 1})])
def test_settings_are_inherited_like_attributes_of_classes(
    files: list[tuple[list[int], dict[str, Any]]], tmp_path: Path
) -> None:
    classes: list[type] = []
    for number, (bases, attributes) in enumerate(files):
        tree: dict[str, Any] = {"name": "run", "_base_": [f"{base}.yaml" for base in bases]}
        for path, value in attributes.items():
            section, _, key = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[key] = value
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(tree, width=1000))
        try:
            # Later bases of a config take precedence, and earlier ones of a class.
            parents = tuple(classes[base] for base in reversed(bases))
            classes.append(type(str(number), parents, attributes))
        except TypeError:
            with pytest.raises(ConfigError, match=rf"{number}\.yaml:1: _base_: "):
                load_config(tmp_path / f"{number}.yaml")
            return
    loaded = load_config(tmp_path / f"{len(files) - 1}.yaml")
    for path in SETTINGS:
        expected = getattr(classes[-1], path, None)
        assert loaded.select(path) == expected
        if expected is not None:
            setter = next(base for base in classes[-1].__mro__ if path in vars(base))
            assert f"/{setter.__name__}.yaml:" in loaded.origin(path)


@shared_folder
@given(tree=trees(names))
def test_each_key_knows_its_line_and_origins_are_comments(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    dump_config(tree, tmp_path / "a.yaml")
    lines = (tmp_path / "a.yaml").read_text().split("\n")
    loaded = load_config(tmp_path / "a.yaml")

    def check(section: dict[str, Any], prefix: str) -> None:
        for key, value in section.items():
            file, _, line = loaded.origin(prefix + key).rpartition(":")
            assert file == str(tmp_path / "a.yaml")
            assert lines[int(line) - 1].lstrip(" -").startswith((f"{key}:", f"'{key}':"))
            if isinstance(value, dict):
                check(value, f"{prefix}{key}.")

    check(tree, "")
    (tmp_path / "shown.yaml").write_text(format_config(loaded, origins=True), encoding="utf-8")
    assert load_config(tmp_path / "shown.yaml") == loaded


@shared_folder
@given(source=st.one_of(st.text(), st.text("abc:-[]{}&*!|>%@`'\"#\n\t ,?<=$")))
@example(source="a: &x [*x]")
@example(source="a: &x {<<: *x}")
@example(source="? [a]\n: 1")
@example(source="a: 0b_")
@example(source="a: !!set {b}")
def test_any_text_loads_or_gives_a_config_error(source: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(source, encoding="utf-8", errors="surrogatepass")
    try:
        load_config(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017


@shared_folder
@given(override=st.one_of(st.text(), st.text("ab.=[]{}:'\"0 ")))
def test_any_override_is_applied_or_named(override: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: 1}\nlist: [1, {x: 2}]\n")
    try:
        load_config(path, [override])
    except ConfigError as error:
        assert str(error)  # noqa: PT017


@settings(max_examples=60, deadline=None)
@given(key=st.one_of(st.text(), st.text("ab.", max_size=8)))
def test_looking_up_any_text_gives_none_or_a_key_error(key: str) -> None:
    top, dot, _ = key.partition(".")
    # Hypothesis also tries texts of this repository, which may be valid import paths.
    assume(not (dot and top.isidentifier() and importlib.util.find_spec(top)))
    registry = Registry("EMPTY", scope="a")
    Registry("CHILD", parent=registry, scope="b")
    assert registry.get(key) is None
    assert key not in registry
    with pytest.raises(KeyError) as caught:
        build_from_cfg({"type": key}, registry)
    assert str(caught.value).startswith(key[:77])
