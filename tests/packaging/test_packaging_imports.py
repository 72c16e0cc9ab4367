"""Imports between our modules: no cycles, and front doors list what other folders import."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

from source_tree import FILES, ROOT


def test_no_two_files_of_the_tests_have_one_name() -> None:
    """All test folders are on the import path, also in rank processes."""
    count = Counter(file.name for file in (ROOT / "tests").rglob("*.py"))
    assert {name for name, times in count.items() if times > 1} == {"conftest.py"}


def get_module(file: Path) -> tuple[str, ...]:
    names = file.relative_to(ROOT).with_suffix("").parts
    return names[:-1] if names[-1] == "__init__" else names


MODULES = {get_module(file): file for file in FILES}


def names(module: tuple[str, ...], file: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield our modules and names that a module imports anywhere, also for type checkers."""
    package = module if file.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((base, alias.name) for alias in node.names)


def imported(module: tuple[str, ...], file: Path) -> Iterator[tuple[str, ...]]:
    for base, name in names(module, file):
        candidates = ((*base, name), base)
        yield from [
            candidate for candidate in candidates if candidate in MODULES and candidate != module
        ][:1]


def test_rooms_state_their_purpose() -> None:
    rooms = [file for file in FILES if file.name == "__init__.py"]
    assert not [file for file in rooms if not ast.get_docstring(ast.parse(file.read_text()))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: set(imported(module, file)) for module, file in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_front_doors_list_all_names_that_other_folders_import() -> None:
    unlisted = [
        f"{'.'.join(module)}: from {base[0]} import {name}"
        for module, file in MODULES.items()
        for base, name in names(module, file)
        if len(base) == 1 and base[0] != module[0] and (*base, name) not in MODULES
        if name not in import_module(f"stepwrap.{base[0]}").__all__
    ]
    assert not unlisted
