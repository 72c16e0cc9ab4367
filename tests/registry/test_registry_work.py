"""The work for large registries and configs does not grow faster than their size."""

from pathlib import Path

import pytest
from work import count_calls

from stepwrap.registry import ConfigError, Registry, check_component, load_config


def test_hints_for_many_wrong_interpolations_are_few(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    rows = [f"  key{index}: ${{model.kye{index}}}\n" for index in range(60)]
    file.write_text("".join(["model:\n", *rows]))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    problems = [str(problem) for problem in caught.value.problems]
    assert len(problems) == 60
    assert ["did you mean" in message for message in problems] == [True] * 20 + [False] * 40


def test_the_check_of_a_class_asks_for_its_signature_a_fixed_number_of_times() -> None:
    registry = Registry("THINGS", scope="work")

    def make(name: str, count: int) -> None:
        arguments = ", ".join(f"a{index}: int" for index in range(count))
        scope: dict[str, type] = {}
        exec(f"class {name}:\n    def __init__(self, {arguments}): pass\n", scope)
        registry.register_module(name, module=scope[name])

    make("Small", 2)
    make("Large", 50)
    counts = [
        count_calls(
            "get_signature", lambda name=name: check_component({"type": name}, registry, "at")
        )
        for name in ("Small", "Large")
    ]
    assert counts[0] == counts[1]


def test_a_scope_is_found_in_one_walk_over_the_family() -> None:
    root = Registry("THINGS", scope="root")
    children = [Registry("THINGS", parent=root, scope=f"s{index}") for index in range(50)]
    grandchild = Registry("THINGS", parent=children[0], scope="below")
    expected = [children[1], root, children[0], grandchild, *children[2:]]
    assert list(children[1].family()) == expected
    assert count_calls("_tree", lambda: children[1].at_scope("s49")) <= 3 * len(expected)
