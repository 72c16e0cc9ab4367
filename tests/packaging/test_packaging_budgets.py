"""The limits on sizes, folders and imports, checked for every source file."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

from source_tree import FILES, ROOT

FOLDER_FILES = 12
FILE_LINES = 600
FUNCTION_LINES = 45
CLASS_LINES = 300
METHODS = 15
PARAMETERS = 8
# Hook is the list of events itself: every method but two is an empty event. CollectiveGroup is the
# list of documented calls: each method hands its arguments to one function and has no logic.
# BasePool has multiprocessing's calls and the documented methods to override. OptimWrapperDict
# hands the documented calls of an optimizer wrapper to each member.
MANY_METHODS = {"BasePool", "CollectiveGroup", "Hook", "OptimWrapperDict", "RpcGroup"}
# The documented signatures of systems whose names we keep. Runner has an argument for each part,
# a training loop one for each key of its section in a config.
MANY_PARAMETERS = {
    "loops/train.py:__init__",
    "parallel/placement/assigner.py:__init__",
    "parallel/placement/assigner.py:optimize_placement",
    "parallel/pools/pool.py:__init__",
    "rpc/servers/gradient_server.py:__init__",
    "rpc/world/world.py:__init__",
    "runner/runner.py:__init__",
}


def nodes(file: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))


def lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    statement = node.body[0]
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    documented = statement.end_lineno - statement.lineno + 1 if is_docstring else 0
    return node.end_lineno - node.lineno + 1 - documented


def overruns(file: Path) -> list[str]:
    over = []
    if (length := len(file.read_text().splitlines())) > FILE_LINES:
        over.append(f"{length} lines in the file, {FILE_LINES} allowed")
    for node in nodes(file, ast.FunctionDef, ast.AsyncFunctionDef):
        if (length := lines_without_docstring(node)) > FUNCTION_LINES:
            over.append(f"{node.name}: {length} lines, {FUNCTION_LINES} allowed")
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own_arguments = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        location = f"{file.relative_to(ROOT)}:{node.name}"
        if len(own_arguments) > PARAMETERS and location not in MANY_PARAMETERS:
            over.append(f"{node.name}: {len(own_arguments)} parameters, {PARAMETERS} allowed")
    for node in nodes(file, ast.ClassDef):
        if (length := node.end_lineno - node.lineno + 1) > CLASS_LINES:
            over.append(f"{node.name}: {length} lines, {CLASS_LINES} allowed")
        # Overloads of a method have the same name and count once.
        methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        if len(methods) > METHODS and node.name not in MANY_METHODS:
            over.append(f"{node.name}: {len(methods)} methods, {METHODS} allowed")
    return [f"{file.relative_to(ROOT)}: {line}" for line in over]


def test_files_keep_the_limits() -> None:
    assert len(FILES) > 30
    assert not [line for file in FILES for line in overruns(file)]


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
    for node in nodes(file, ast.ImportFrom):
        if node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((base, alias.name) for alias in node.names)


def imported(module: tuple[str, ...], file: Path) -> Iterator[tuple[str, ...]]:
    for base, name in names(module, file):
        candidates = ((*base, name), base)
        yield from [
            candidate for candidate in candidates if candidate in MODULES and candidate != module
        ][:1]


def test_folders_are_small_and_state_their_purpose() -> None:
    count = Counter(file.parent for file in FILES if file.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in count.items() if n > FOLDER_FILES}
    assert not crowded
    # Files are at most two levels below the root.
    assert not [file for file in FILES if len(file.relative_to(ROOT).parts) > 3]
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
