"""Where a class is defined under the working directory, read without importing anything."""

import ast
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "env", "__pycache__"}
_MAX_FILES = 2000
_MAX_SECONDS = 2.0


class Definition(NamedTuple):
    """A class or function of the wanted name in a source file."""

    name: str
    kind: str
    path: Path
    line: int
    registers: bool

    def advice(self) -> str:
        """Return the sentence that says how to make the definition importable."""
        where = f"{self.kind} {self.name} is defined in {self.path}:{self.line}"
        module = ".".join(self.path.with_suffix("").parts)
        if _is_imported(self.path):
            return f"{where} but is not registered here: write type: {module}.{self.name}"
        if self.registers:
            return f"{where} but was never imported: add {module} to imports"
        return f"{where} but was never imported: write type: {module}.{self.name}"


def find_definitions(name: str, root: Path | None = None) -> list[Definition]:
    """Return the definitions of `name` in the Python files under `root` (default: cwd).

    Hidden folders, environments and build folders are left out; the search ends after 2,000
    files or two seconds. The paths are relative to `root`.
    """
    if not name.isidentifier():
        return []
    root = Path.cwd() if root is None else root
    wanted = re.compile(rf"^\s*(?:class|def)\s+{re.escape(name)}\b", re.MULTILINE)
    found: list[Definition] = []
    for path in _source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
            if wanted.search(text):
                found += _definitions_in(ast.parse(text), name, path.relative_to(root))
        except (OSError, ValueError, SyntaxError, RecursionError):
            # An unreadable file holds nothing that could be imported.
            continue
    return found


def _source_files(root: Path) -> Iterator[Path]:
    stop = time.monotonic() + _MAX_SECONDS
    count = 0
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            sub
            for sub in subfolders
            if not sub.startswith(".")
            and sub not in _SKIPPED
            and not os.path.exists(os.path.join(folder, sub, "pyvenv.cfg"))
        )
        for file in sorted(files):
            if file.endswith(".py"):
                count += 1
                if count > _MAX_FILES or time.monotonic() > stop:
                    return
                yield Path(folder, file)


def _definitions_in(tree: ast.Module, name: str, path: Path) -> Iterator[Definition]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            registers = any("register_module" in ast.dump(d) for d in node.decorator_list)
            yield Definition(name, kind, path, node.lineno, registers)


def _is_imported(path: Path) -> bool:
    absolute = str(path.absolute())
    # Not getattr: a lazy module may import something when it is asked for an attribute.
    loaded = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return any(names.get("__file__") == absolute for names in loaded)
