"""The page on migration: every dotted name, command and setting in a right column exists."""

import importlib
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import click
import pytest
import yaml
from pages import find_all, page, section
from source_tree import FOLDERS

from stepwrap.registry import RunSections, SchedulerSection
from stepwrap.registry.catalog import REGISTRIES
from stepwrap.runner.command.cli import COMMANDS


def right_sides() -> list[str]:
    rows = find_all(r"^\|(.+)\|$", page("migrate"))
    cells = [row.split(" | ")[1] for row in rows if " | " in row]
    return [code for cell in cells for code in find_all(r"`([^`]+)`", cell)]


def load(path: str) -> Any:
    target: Any = importlib.import_module(f"stepwrap.{path.split('.')[0]}")
    for name in path.split(".")[1:]:
        try:
            target = getattr(target, name)
        except AttributeError:
            target = importlib.import_module(f"{target.__name__}.{name}")
    return target


def check_setting(code: str) -> None:
    """Check `section: {type: Name, ...}` by the registries and their classes."""
    ((section, values),) = yaml.safe_load(code).items()
    names = {field.name for field in (*fields(RunSections), *fields(SchedulerSection))}
    assert section in names
    types = [values] if not isinstance(values, dict) or "type" in values else values.values()
    for setting in types:
        if isinstance(setting, dict) and "type" in setting:
            assert any(registry.get(setting["type"]) for registry in REGISTRIES.values())


def check(code: str) -> None:
    """Check that a dotted name exists, or that a command or setting is valid.

    Single words are arguments, which the page of their part lists.
    """
    if code.startswith("stepwrap "):
        command, *options = shlex.split(code)[1:]
        entry = COMMANDS.get_command(click.Context(COMMANDS), command)
        entry.make_context(command, ["cfg.yaml", *options])
    elif code.split(".")[0] in FOLDERS:
        load(code)
    elif re.match(r"\w+: ", code) and not code.startswith("_"):
        check_setting(code)


def problems(codes: Iterable[str]) -> Iterator[str]:
    for code in codes:
        try:
            check(code)
        except Exception as error:
            yield f"{code}: {type(error).__name__}: {error}"


def test_every_name_here_exists() -> None:
    codes = {code for code in right_sides() if not code.startswith("plugins.")}
    assert not list(problems(sorted(codes)))


@pytest.mark.parametrize(
    ("plugin", "package"), [("lightning", "pytorch_lightning"), ("mmengine", "mmengine")]
)
def test_every_name_of_a_plugin_exists(plugin: str, package: str) -> None:
    codes = {code for code in right_sides() if code.startswith(f"plugins.{plugin}")}
    assert codes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package, reason=f"no extra {plugin}", exc_type=ImportError)
        assert not list(problems(sorted(codes)))


def test_the_page_has_a_table_for_each_system() -> None:
    trainers = ("mmengine", "Lightning", "Hugging Face's Trainer", "Accelerate")
    for system in (*trainers, "machin", "vis4d", "jactorch"):
        assert "\n| " in section(page("migrate"), f"From {system}"), system
