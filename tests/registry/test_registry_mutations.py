"""Configs with any mistake are loaded or raise a ConfigError."""

import random
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import nightly, slow

from stepwrap.registry import (
    Config,
    ConfigError,
    config_from_dict,
    format_config,
    load_config,
    name_problems,
)

Write = Callable[[str, str], Path]

SHIPPED = [
    path.read_text()
    for path in sorted(map(Path, files("stepwrap.configs").iterdir()))  # type: ignore[arg-type]
    if path.suffix == ".yaml"
]
NAMES = (
    st.integers(0, 9)
    | st.sampled_from(
        ["typezq", "type", "_ref_", "_raw_", "_scope_", "_delete_", "_base_", "imports", "name"]
        + ["k" * 1000, "modle", "trian", "optimzer", "metrc"]
    )
    | st.text(max_size=8)
)
TEXTS = st.sampled_from(
    ["x" * 5000, "${" + "x" * 5000 + "}", "a." * 600, "é/" * 3000, "\u202e"]
    + ["${seed}", "${model}", "${a", "${" * 300, "~x"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, below in pairs:
        yield (*at, key)
        if isinstance(below, dict | list):
            yield from paths(below, (*at, key))


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return a shipped config with up to three keys dropped, renamed, moved or changed."""
    tree = yaml.safe_load(draw(st.sampled_from(SHIPPED)))
    for _ in range(draw(st.integers(1, 3))):
        *above, key = draw(st.sampled_from([*paths(tree)] or [("name",)]))
        section = tree
        for name in above:
            section = section[name]
        kind = draw(st.sampled_from(["drop", "rename", "value", "deep"]))
        value = section.pop(key) if key in section or isinstance(section, list) else None
        if kind == "deep":
            for _ in range(draw(st.sampled_from([48, 60, 120]))):
                value = {"a": value}
        inserted = draw(VALUES) if kind == "value" else value
        if isinstance(section, list):
            section.insert(key, inserted)
        elif kind != "drop":
            section[draw(NAMES) if kind == "rename" else key] = inserted
    return tree


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=mutated())
def test_any_mutation_is_loaded_or_reported(tree: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True, sort_keys=False))
    try:
        problems = name_problems(load_config(path))
    except ConfigError as error:
        problems = error.problems
        assert problems
    for problem in problems:
        assert problem.origin.partition(":")[0].endswith(".yaml") or problem.key == ""
        assert problem.what
        assert "x" * 81 not in problem.what
        assert len(problem.what) < 800
        assert len(str(problem)) < 1500


PIECES = [
    *('"": {_base_: x}', "_base_: a.yaml", "_base_: [digits_single]", "_base_:", "_delete_: true"),
    *("_delete_: 1", "<<: *a", "&a", "*a", "a: &a {b: 1}", "<<: {_base_: x}", "? [a]", "!!set {a}"),
    *("- ", "{", "}", "[", "]", '"', "'", ":", ": ", "|", ">", "#", "\t", "\x00", "\ufeff", "%"),
    *("${a}", "${model}", "${.seed}", "${oc.env:HOME}", "???", "1: 2", "1.5: 2", "null: 1", "~: 1"),
    *("name: ${name}", "imports: 3", "imports: [3, a.py]", "- - - 1", "a.b: {c: 1}", '"\\ud800"'),
    *("model: 3", "seed: 1e400", ".nan", "0b_", "2020-01-01", "é", "\u2028", "yes: no", "---"),
    "...",
]
NEW_VALUES = [
    *("1", "{}", "[]", "true", "null", "{_delete_: true}", "{a: {b: 1}}", "[1, {a: 2}]", "x"),
]


def damaged(text: str, chance: random.Random) -> str:
    """Return a config with lines and characters dropped, repeated, moved and inserted."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 2)):
        at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        line, to = lines[at], chance.randint(0, len(lines[at]))
        snippet = chance.choice(PIECES)
        lines[at] = chance.choice(
            [
                lines[other],
                line[:to] + snippet + line[to:],
                line[:to] + line[to + 1 :],
                line[:to],
                " " * chance.randint(0, 6) + line.lstrip(),
                f"{line}\n{' ' * (len(line) - len(line.lstrip()))}{snippet}",
                f"{line.partition(': ')[0]}: {snippet}",
                f"{line.partition(': ')[0]}: {chance.choice(NEW_VALUES)}",
                line.replace("{", f"{{{snippet}, "),
                f"{line}\n{chance.choice(chance.choice(SHIPPED).splitlines())}",
            ]
        )
    return "\n".join(lines)


def override(config: Config, chance: random.Random) -> str:
    """Return an override of a key of the config or of a similar one."""
    path = ".".join(map(str, chance.choice([*paths(config.to_dict())])))
    end = chance.choice(["", "", ".a", "._delete_", "._base_", ".0", ".", ".1.b"])
    return f"{path}{end}={chance.choice(NEW_VALUES)}"


def check(config: Config, folder: Path) -> None:
    """Check that the printed config has the same settings, with and without origins."""
    assert all(problem.what for problem in name_problems(config))
    for origins in (False, True):
        printed = folder / "printed.yaml"
        printed.write_text(format_config(config, origins=origins), encoding="utf-8")
        assert load_config(printed).to_dict() == config.to_dict()


def fuzz(numbers: range, folder: Path) -> int:
    """Return how many damaged configs could still be read."""
    num_read = 0
    for number in numbers:
        chance = random.Random(number)
        path = folder / "a.yaml"
        path.write_bytes(damaged(chance.choice(SHIPPED), chance).encode(errors="surrogatepass"))
        try:
            config = load_config(path)
            check(config, folder)
            num_read += 1
            check(load_config(path, [override(config, chance)]), folder)
        except ConfigError:
            continue
        except Exception as error:
            raise AssertionError(f"config {number}: {error!r}") from error
    return num_read


@pytest.mark.parametrize(
    "numbers", [range(100), *slow(range(100, 700)), *nightly(range(700, 3000))], ids=str
)
def test_any_damage_is_a_config_error_or_none(numbers: range, tmp_path: Path) -> None:
    assert 0.2 < fuzz(numbers, tmp_path) / len(numbers) < 0.8


def nested(depth: int) -> str:
    return "a: " + "{a: " * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (nested(60), "a.yaml:1: nested more than 50 levels deep"),
        (nested(5000), "a.yaml:1: nested more than 50 levels deep"),
        ("_base_: " + "q" * 5000, "a.yaml:1: the config file qqq"),
        (
            "? " + "k" * 1100 + "\n: 1",
            "a.yaml:1: a key of 1,100 characters; at most 1,024 are allowed",
        ),
        ('a: "\\ud800"', "a.yaml:1: not valid YAML: "),
        ("a: " + "${" * 51 + "b" + "}" * 51, "not a valid interpolation: nested more than 50"),
        ("a: " + "${" * 400 + "b" + "}" * 400, "not a valid interpolation: nested more than 50"),
        ("a: &a {b: 1}\nc: {<<: 3}", "a.yaml:2: `<<` takes a section, or a list of sections"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(write: Write, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("a.yaml", text))
    assert said in str(caught.value)
    assert not re.search("[qk]{81}", str(caught.value).partition(": ")[2])
    assert len(str(caught.value)) < 500


def bomb(head: str, line: str, copy: str) -> str:
    """Return YAML that has 10 ** 9 values once all its copies are expanded."""
    lines = [head]
    for at in range(1, 9):
        lines.append(line.format(at=at, copies=", ".join([copy.format(at=at - 1)] * 10)))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb("b0: &b0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "b{at}: &b{at} [{copies}]", "*b{at}"),
        bomb("b0: &b0 {k: 1}", "b{at}: &b{at} {{<<: [{copies}]}}", "*b{at}"),
        bomb("b0: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "b{at}: [{copies}]", "'${{b{at}}}'"),
        bomb("b0: x", "b{at}: '{copies}'", "${{b{at}}}"),
    ],
    ids=["lists", "merges", "interpolations", "texts"],
)
def test_copies_of_copies_are_bounded(write: Write, text: str) -> None:
    """Expanding 10 ** 9 values would not end."""
    with pytest.raises(ConfigError, match="repeat more than 10,000 values"):
        load_config(write("a.yaml", text))


def test_merges_keep_the_keys_next_to_them(write: Write) -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {y: 3, <<: [*a, *b]}\nd: {<<: *b, x: 4}\n"
    config = load_config(write("a.yaml", text)).to_dict()
    assert config["c"] == {"x": 1, "y": 3, "z": 2}
    assert config["d"] == {"x": 4, "z": 2}


def test_overrides_and_dicts_are_bounded_as_files_are(write: Write) -> None:
    path = write("a.yaml", "a: {b: 1}\n")
    deep: dict[str, Any] = {}
    deep["a"] = deep
    for override in ("a." * 1000 + "b=1", "a." * 40 + "b=" + "[" * 40 + "]" * 40):
        with pytest.raises(ConfigError, match="nested more than 50 levels deep"):
            load_config(path, [override])
    with pytest.raises(ConfigError, match=r"a\.a\.a: nested .* 50 levels"):
        config_from_dict(deep)


def test_endless_chains_of_bases_are_reported(write: Write) -> None:
    for at in range(60):
        write(f"c{at}.yaml", f"_base_: c{at + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 50 files are nested"):
        load_config("c0.yaml")


def test_long_keys_with_dots_are_found_quickly(write: Write) -> None:
    """Paths are looked up part by part; trying all ways to join the parts would take minutes."""
    sections = "".join(f"s{at}: {{{'.'.join('x' * 400)}: 1}}\n" for at in range(30))
    config = load_config(write("a.yaml", sections))
    for at in range(30):
        path = f"s{at}.{'.'.join('x' * 400)}"
        assert config.has(path)
        assert config.origin(path) == f"a.yaml:{at + 1}"
        assert not config.has(".".join(["q"] * 5000))
