"""The classes of modules such as torch.optim, read from their files without importing them."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

# A class with its docstring's first line, and a docstring that is set afterwards.
_CLASS = re.compile(
    r"^class (\w+)(?:\([^)]*\))?:[^\n]*\n(?:\s+(?:__doc__ = )?\(?\s*[rRfF]{0,2}\"\"\"\s*([^\n]*))?",
    re.MULTILINE,
)
_LATER_DOC = re.compile(r'^(\w+)\.__doc__ = \(?\s*[rRfF]{0,2}"""\s*([^\n]*)', re.MULTILINE)


class _Module(NamedTuple):
    """What a source file offers: its own classes, and names that it takes from others."""

    classes: dict[str, str]
    imported: dict[str, tuple[str, str]]
    starred: list[str]
    public: list[str] | None


class NamespaceReader:
    """Reads modules, each once."""

    def __init__(self) -> None:
        self._modules: dict[str, _Module | None] = {}

    def classes(self, module: str) -> dict[str, str]:
        """Return the public classes of a module with the first lines of their docstrings."""
        read = self._read(module)
        if read is None:
            return {}
        names = [*read.imported, *read.classes]
        for source in read.starred:
            names += self.classes(source)
        found = {}
        for name in dict.fromkeys(names if read.public is None else read.public):
            summary = None if name.startswith("_") else self._summary(module, name)
            if summary is not None:
                found[name] = summary
        return found

    def _summary(self, module: str, name: str, depth: int = 0) -> str | None:
        """Return the docstring line of a class, None when the name is no class."""
        read = self._read(module)
        if read is None or depth > 8:
            return None
        if name in read.classes:
            return read.classes[name]
        if name in read.imported:
            source, original = read.imported[name]
            return self._summary(source, original, depth + 1)
        found = (self._summary(source, name, depth + 1) for source in read.starred)
        return next((summary for summary in found if summary is not None), None)

    def _read(self, module: str) -> _Module | None:
        if module not in self._modules:
            path = _source_of(module)
            self._modules[module] = None if path is None else _parse(path, module)
        return self._modules[module]


def _source_of(module: str) -> Path | None:
    """Return the file of a module; only the top package is asked for, which imports nothing."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.origin is None and rest:
        # A namespace package: importing it runs nothing, and only import hooks know its folders.
        spec = importlib.util.find_spec(f"{top}.{rest.pop(0)}")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        base = Path(folder, *rest)
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _parse(path: Path, module: str) -> _Module:
    text = path.read_text(encoding="utf-8")
    classes = {match[1]: (match[2] or "").strip('" ') for match in _CLASS.finditer(text)}
    classes.update((m[1], m[2]) for m in _LATER_DOC.finditer(text) if m[1] in classes)
    read = _Module(classes, {}, [], None)
    # Long modules define classes, only package files are collections of imports.
    if path.name != "__init__.py":
        return read._replace(public=_public_names(text))
    package = module.split(".")
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    read.starred.append(source)
                else:
                    read.imported[alias.asname or alias.name] = (source, alias.name)
    return read._replace(public=_public_names(text))


def _public_names(text: str) -> list[str] | None:
    """Return the literal `__all__` of a module."""
    match = re.search(r"^__all__(?:: [^=]+)? = (\[[^\]]*\])", text, re.MULTILINE)
    if match is None:
        return None
    try:
        names = ast.literal_eval(match[1])
    except (ValueError, SyntaxError):
        return None
    return [name for name in names if isinstance(name, str)]
