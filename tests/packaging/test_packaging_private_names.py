"""Private names of torch that the library uses: docs/extending.md has a table of all."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed.rpc
from source_tree import FILES, ROOT
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Objects of torch whose private names count as torch's, even if the library uses the same name.
KINDS = (
    torch,
    torch.distributed,
    torch.distributed.rpc,
    nn.Module,
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.Function,
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    DataParallel,
    DistributedDataParallel,
)
# Names of Python, cloudpickle, datasets and torchmetrics, config keys, and the library's marks.
OTHERS = {
    "_asdict",
    "_cond",
    "_current_frames",
    "_dispatch_table",
    "_distributed",
    "_exit",
    "_extra_reducers",
    "_fields",
    "_formatting",
    "_forkserver",
    "_getframe",
    "_served_immediately",
    "_on_meta",
    "_popen",
    "_preload_modules",
    "_reductions",
    "_ref_",
    "_scope_",
    "_to_sync",
}
# The library's own attributes that torch's objects also have.
OWN = {"_check", "_classes", "_tensor"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
FSDP_FILE = "wrappers/fsdp/torch_internals.py"


def is_private(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"_[a-zA-Z]\w*", name))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines or sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if getattr(node.value, "id", "") in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file reads: attributes, and names in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            name = getattr(node.args[1], "value", None)
            if is_private(name):
                yield str(name)
        elif isinstance(node, ast.Subscript) and is_private(getattr(node.slice, "value", None)):
            yield node.slice.value  # type: ignore[attr-defined]


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted paths of private names that a file imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = str(node.module)
            if module.split(".")[0] == "torch":
                if any(map(is_private, module.split("."))):
                    yield module
                else:
                    yield from (
                        f"{module}.{alias.name}" for alias in node.names if is_private(alias.name)
                    )


@cache
def used() -> dict[str, set[str]]:
    """Return the files that use each private name of torch."""
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}
    own_private = {name for tree in trees.values() for name in own_names(tree)}
    of_torch = {name for kind in KINDS for name in dir(kind)} | set(vars(nn.Module()))
    ours = ((own_private | OTHERS) - of_torch) | OWN
    files_by_name: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in [*attributes(tree), *imports(tree)]:
            if name not in ours:
                files_by_name.setdefault(name, set()).add(file)
    return files_by_name


def listed() -> set[str]:
    text = (ROOT / "docs" / "extending.md").read_text()
    section = text[text.index("## Private names of torch") :]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_private_names_of_torch_are_listed() -> None:
    files_by_name, table = used(), listed()
    unlisted = {name: sorted(files_by_name[name]) for name in files_by_name.keys() - table}
    assert not unlisted, (
        f"private names of torch that docs/extending.md does not list: {unlisted}. Use a public "
        "name, or add a row with the reason"
    )
    gone = sorted(table - files_by_name.keys())
    assert not gone, f"docs/extending.md lists private names of torch without a use: {gone}"


def test_the_state_of_fsdp_is_read_in_one_file() -> None:
    names = [name for name, files in used().items() if FSDP_FILE in files]
    assert "_get_fsdp_state" in names
    shared = {"_C", "_current_graph_task_id"}
    assert {file for name in set(names) - shared for file in used()[name]} == {FSDP_FILE}


def test_uses_are_found() -> None:
    text = "from torch.a._b import c\nfrom torch.d import _e\nx._f\ngetattr(x, '_g')\nvars(x)['_h']"
    tree = ast.parse(text)
    assert sorted(imports(tree)) == ["torch.a._b", "torch.d._e"]
    assert sorted(attributes(tree)) == ["_f", "_g", "_h"]
