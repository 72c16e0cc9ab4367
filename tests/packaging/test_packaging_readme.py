"""What the README and the docs show is true."""

import configparser
import inspect
import json
import re
from pathlib import Path

import click
import pytest
import yaml
from programs import run

from stepwrap.registry import DEFAULT_HOOKS, HOOK_TYPES, HOOKS
from stepwrap.runner.command.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def blocks(file: str, language: str) -> list[str]:
    text = (ROOT / file).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    out = run("-c", code, cwd=tmp_path)
    accuracy = float(re.search(r"'accuracy': ([\d.]+)", out)[1])
    assert accuracy > 0.95
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_import_of_the_readme_registers_the_strategy(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "py")
    assert "StepStrategy" in run("-c", f"{code}\nprint(type(trainer.strategy))", cwd=tmp_path)


def test_the_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = set(re.findall(r"\]\(([^)#]+)\)", text))
    assert {link for link in links if not (ROOT / link).exists()} == set()
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages <= links


def test_the_extras_of_the_readme_are_those_of_the_package() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    # What developers alone need is not for users.
    assert {*named, "test"} == set(parser["options.extras_require"])


def test_the_page_on_the_command_names_all_of_it() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    context = click.Context(COMMANDS)
    names = COMMANDS.list_commands(context)
    shown = re.findall(r"^stepwrap ([\w-]+) ", page, flags=re.MULTILINE)
    assert sorted(set(shown)) == names
    takers = dict(re.findall(r"^\| `--([\w-]+)\b.*?` \| (.*?) \|", page, flags=re.MULTILINE))
    assert takers.pop("debug") == "all"
    expected: dict[str, set[str]] = {}
    for name in names:
        for option in COMMANDS.get_command(context, name).params[1:]:
            expected.setdefault(option.name.replace("_", "-"), set()).add(name)
    assert expected.pop("debug") == set(names)
    assert {option: set(names.split(", ")) for option, names in takers.items()} == expected


def test_the_tree_of_the_readme_names_every_source_folder() -> None:
    text = (ROOT / "README.md").read_text()
    folders = {file.parent.name for file in ROOT.glob("[a-z]*/__init__.py")}
    assert {folder for folder in folders if f"\n{folder}/ " not in text} == set()


def test_the_commands_of_the_readme_are_there() -> None:
    (commands,) = [text for text in blocks("README.md", "") if "make demo" in text]
    named = set(re.findall(r"\bmake ([\w-]+)", commands))
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test", "test-all"} <= named <= set(" ".join(targets).split())


def test_the_yaml_of_the_docs_is_yaml() -> None:
    whole, *sections = blocks("docs/configs.md", "yaml")
    assert "model" in yaml.safe_load(whole)
    assert all(isinstance(yaml.safe_load(text), dict) for text in sections)


def test_the_docs_name_every_hook() -> None:
    text = (ROOT / "docs/configs.md").read_text()
    for name, kind in HOOK_TYPES.items():
        on = "on" if name in DEFAULT_HOOKS else "off"
        assert f"| {name} | {kind} | {on} |" in text


def shown_arguments(page: str, name: str, kind: str) -> dict[str, str]:
    """Return the arguments and defaults that the page on hooks lists for a hook."""
    section = page.partition(f"\n## {name}: {kind}\n")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .{20,} \|$", section, flags=re.MULTILINE))
    assert shown or "No arguments." in section, f"{name}: no list of arguments"
    return shown


def test_the_page_on_hooks_lists_every_argument_and_default() -> None:
    page = (ROOT / "docs/hooks.md").read_text()
    shown = {name: shown_arguments(page, name, kind) for name, kind in HOOK_TYPES.items()}
    assert shown == {
        name: {
            parameter.name: "required"
            if parameter.default is parameter.empty
            else f"`{json.dumps(parameter.default)}`".replace('"', "")
            for parameter in inspect.signature(HOOKS.get(kind)).parameters.values()
        }
        for name, kind in HOOK_TYPES.items()
    }
