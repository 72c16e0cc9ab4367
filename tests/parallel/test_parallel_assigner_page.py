"""The page on placement runs, and names every argument."""

import inspect
import re
from pathlib import Path
from typing import Any

from stepwrap.parallel import ModelAssigner

PAGE = (Path(__file__).parents[2] / "docs/placement.md").read_text()


def test_the_examples_run() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```py\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(code, names)
    assert set(names["assigner"].placement) == set(names["models"])
    assert str(names["plan"].placement["world"]) == "cuda:1"


def test_every_argument_has_its_row_and_default() -> None:
    _, _, rows = PAGE.partition("## All arguments")
    described = {}
    for names, defaults in re.findall(r"^\| (`.+?) \| (.*?) ?\| .+ \|$", rows, flags=re.MULTILINE):
        arguments = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ")
        described.update(
            zip(arguments, values if len(values) > 1 else values * len(arguments), strict=True)
        )
    parameters = dict(inspect.signature(ModelAssigner).parameters)
    assert list(described) == list(parameters)
    for name, written in described.items():
        if written and written not in ("measured", "estimated"):
            assert str(parameters[name].default) == written, name
