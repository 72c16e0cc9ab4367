"""The rooms of the house: few files in each, a word about every one, and no cycle."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

from source_tree import FILES, ROOT

MOST_FILES = 12


def module_of(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(file): file for file in FILES}


def relative_imports(
    module: tuple[str, ...], file: Path
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Where a module imports from and which names, in functions and for type checkers too."""
    package = module if file.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            yield base, [alias.name for alias in node.names]


def imported(module: tuple[str, ...], file: Path) -> Iterator[tuple[str, ...]]:
    """Modules of ours that a module imports."""
    for base, names in relative_imports(module, file):
        for name in names:
            found = next(one for one in ((*base, name), base, ()) if one in MODULES or not one)
            if found and found != module:
                yield found


def test_a_folder_has_few_files() -> None:
    count = Counter(file.parent for file in FILES if file.name != "__init__.py")
    crowded = {str(one.relative_to(ROOT)): n for one, n in count.items() if n > MOST_FILES}
    assert not crowded


def test_a_folder_is_at_most_two_levels_below_the_root() -> None:
    assert not [file for file in FILES if len(file.relative_to(ROOT).parts) > 3]


def test_every_room_says_what_it_is_for() -> None:
    rooms = [file for module, file in MODULES.items() if file.name == "__init__.py"]
    assert not [file for file in rooms if not ast.get_docstring(ast.parse(file.read_text()))]


def test_front_doors_list_what_other_folders_import_from_them() -> None:
    unlisted = [
        f"{'.'.join(module)}: from {'.'.join(base)} import {name}"
        for module, file in MODULES.items()
        for base, names in relative_imports(module, file)
        if base and base[0] != module[0]
        for name in names
        if len(base) == 1 and name not in import_module(f"stepwrap.{base[0]}").__all__
    ]
    assert not unlisted


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: set(imported(module, file)) for module, file in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())
