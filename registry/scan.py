"""List registered names, read from source files without importing them; count registrations."""

import ast
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..primitives.suggestions import did_you_mean
from .catalog import REGISTRIES
from .errors import RegistryKeyError
from .registry import Registry

_ROOT = Path(__file__).resolve().parent.parent
# Update it with each release, with transformers installed:
# `python -c "from stepwrap.registry.scan import *; write_table()"`
_TABLE = Path(__file__).with_name("namespaces.json")
# torchmetrics has these classes only if transformers is installed.
_NEED_TRANSFORMERS = frozenset({"BERTScore", "InfoLM"})
_REGISTER = "register_module"
_log = logging.getLogger(__name__)


class Registration(NamedTuple):
    """A name that a config can use as ``type``.

    Attributes:
        summary: the first line of the docstring, "" without one.
        aliases: further names of the same class or function.
        source: its module or namespace.
        arguments: the declaration of each argument, such as "patience: int = 3", and its text in
            the docstring. Empty for classes from a namespace.
    """

    name: str
    summary: str
    aliases: tuple[str, ...]
    source: str
    arguments: tuple[tuple[str, str], ...] = ()


def list_registrations(registry_name: str | None = None) -> dict[str, list[Registration]]:
    """Return the names that each registry offers, sorted.

    They are read from our source files and, for torch, torchmetrics and peft, from a table. If the
    table does not cover the installed versions of torch and torchmetrics, these packages are
    imported. Registrations in the user's modules are not included.

    Args:
        registry_name: only list this registry; case does not matter ("hooks").

    Raises:
        KeyError: the registry does not exist.
    """
    registries = REGISTRIES
    if registry_name is not None:
        name = registry_name.upper()
        if name not in REGISTRIES:
            hint = did_you_mean(name, REGISTRIES) or f"; they are {', '.join(REGISTRIES)}"
            raise RegistryKeyError(f"unknown registry {registry_name}{hint}")
        registries = {name: REGISTRIES[name]}
    locations = {
        location for registry in registries.values() for location in registry.sources.locations
    }
    registrations = [pair for location in sorted(locations) for pair in _registered_in(location)]
    return {name: _entries(registry, registrations) for name, registry in registries.items()}


def traverse_registry_tree(registry: Registry, verbose: bool = True) -> list[dict[str, Any]]:
    """Return the registered names of each registry of a family, parents before their children.

    Imports the locations. Classes in a namespace, such as torch.optim, are not registered.

    Args:
        registry: any registry of the family; the list starts at the root.
        verbose: log a line for each registry.

    Returns:
        Dicts with ``scope``, ``num_modules``, and the names by the folder of their modules
        ("my_package/models").
    """
    counted: list[dict[str, Any]] = []
    for member in registry.root.family():
        by_folder: dict[str, list[str]] = {}
        for name in member:
            package = str(getattr(member.module_dict[name], "__module__", "")).rpartition(".")[0]
            by_folder.setdefault(package.replace(".", "/"), []).append(name)
        counted.append({"num_modules": len(member), "scope": member.scope, **by_folder})
        if verbose:
            _log.info("%s of %s has %d registered", member.name, member.scope, len(member))
    return counted


def count_registered_modules(
    save_path: str | os.PathLike[str] | None = None, verbose: bool = True
) -> dict[str, Any]:
    """Return the result of ``traverse_registry_tree`` for every registry.

    Args:
        save_path: a folder in which to also save it as modules_statistic_results.json.
        verbose: log a line for each registry.

    Returns:
        A dict with ``scan_date``, and ``registries``: the list of each registry by its name.
    """
    counts = {
        name: traverse_registry_tree(registry, verbose) for name, registry in REGISTRIES.items()
    }
    counted = {"scan_date": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "registries": counts}
    if save_path is not None:
        file = Path(save_path, "modules_statistic_results.json")
        file.write_text(json.dumps(counted, indent=2), encoding="utf-8")
    return counted


def _entries(
    registry: Registry, registrations: list[tuple[str, Registration]]
) -> list[Registration]:
    entries = {entry.name: entry for owner, entry in registrations if owner == registry.name}
    for namespace in registry.sources.namespaces:
        for entry in _offered_by(namespace):
            entries.setdefault(entry.name, entry)
    for alias, target in registry.aliases.items():
        entry = entries[target]
        entries[target] = entry._replace(aliases=(*entry.aliases, alias))
    return sorted(entries.values(), key=lambda entry: entry.name.lower())


def _offered_by(namespace: str) -> Iterator[Registration]:
    """Yield the public classes of a namespace."""
    if namespace.startswith("stepwrap."):
        path = _ROOT.joinpath(*namespace.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield _described(node, namespace, {})
        return
    for name, summary in _classes()[namespace].items():
        yield Registration(name, summary, (), namespace)


@cache
def _classes() -> dict[str, dict[str, str]]:
    """Return the classes of torch, torchmetrics and peft by namespace, each with its summary."""
    table = read_table()
    # Other releases may have other classes. Importing them is slow but always correct.
    return table.classes if table.covers_installed else make_classes()


class _Table(NamedTuple):
    """The content of namespaces.json: the releases ("2.13") of each package, and their classes."""

    versions: dict[str, list[str]]
    classes: dict[str, dict[str, str]]

    @property
    def covers_installed(self) -> bool:
        return all(release in self.versions[name] for name, release in _installed().items())


def read_table() -> _Table:
    """Read namespaces.json, without classes that need a package that is not installed."""
    table = _Table(**json.loads(_TABLE.read_text(encoding="utf-8")))
    if find_spec("transformers") is None:
        for classes in table.classes.values():
            for name in _NEED_TRANSFORMERS & classes.keys():
                del classes[name]
    return table


def make_classes() -> dict[str, dict[str, str]]:
    """Import torch, torchmetrics and peft, and return the content of ``_Table.classes``."""
    classes = {
        namespace: registry.sources.summaries(namespace)
        for registry in REGISTRIES.values()
        for namespace in registry.sources.namespaces
        if not namespace.startswith(("stepwrap.", "peft"))
    }
    if find_spec("peft") is None:
        return {**classes, "peft": read_table().classes["peft"]}
    # peft also has classes of models, which are not adapters.
    registry = REGISTRIES["ADAPTERS"]
    summaries = registry.sources.summaries("peft")
    return {**classes, "peft": {name: summaries[name] for name in registry.sources.names()}}


def _installed() -> dict[str, str]:
    """Return the installed releases; patch versions have the same classes."""
    return {name: ".".join(version(name).split(".")[:2]) for name in ("torch", "torchmetrics")}


def _registered_in(location: str) -> Iterator[tuple[str, Registration]]:
    """Yield (registry name, registration) for one of our modules, or the files of a package."""
    root = _ROOT.joinpath(*location.split(".")[1:])
    for path in sorted(root.rglob("*.py")) or [root.with_suffix(".py")]:
        text = path.read_text(encoding="utf-8")
        if _REGISTER in text:
            components = ("stepwrap", *path.relative_to(_ROOT).with_suffix("").parts)
            module = ".".join(components).removesuffix(".__init__")
            yield from _registered_by(ast.parse(text), module)


def _registered_by(tree: ast.Module, module: str) -> Iterator[tuple[str, Registration]]:
    """Yield the registrations that decorators ``@REGISTRY.register_module(name=[...])`` make."""
    definitions = [
        definition
        for definition in tree.body
        if isinstance(definition, ast.ClassDef | ast.FunctionDef)
    ]
    classes = {node.name: node for node in definitions if isinstance(node, ast.ClassDef)}
    for node, call in [
        (definition, call) for definition in definitions for call in definition.decorator_list
    ]:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        registry, entry = call.func.value, _described(node, module, classes)
        if call.func.attr == _REGISTER and isinstance(registry, ast.Name):
            name_values = [word.value for word in call.keywords if word.arg == "name"]
            names = ast.literal_eval(name_values[0]) if name_values else node.name
            main_name, *aliases = [names] if isinstance(names, str) else names
            yield registry.id, entry._replace(name=main_name, aliases=tuple(aliases))


def _described(
    node: ast.ClassDef | ast.FunctionDef, module: str, classes: Mapping[str, ast.ClassDef]
) -> Registration:
    text = ast.get_docstring(node) or ""
    maker = _find_maker(node, classes)
    meanings = documented_items(text, "Args")
    declarations = [] if maker is None else list(_declarations(maker.args))
    if maker is None and isinstance(node, ast.ClassDef) and _is_dataclass(node):
        declarations = list(_fields(node, classes).values())
    arguments = tuple(
        (declaration, meanings.get(declaration.partition(":")[0], ""))
        for declaration in declarations
    )
    return Registration(node.name, text.partition("\n")[0], (), module, arguments)


def _find_maker(
    node: ast.ClassDef | ast.FunctionDef, classes: Mapping[str, ast.ClassDef]
) -> ast.FunctionDef | None:
    """Return the function, or the ``__init__`` of the class or of a base in the same module."""
    if isinstance(node, ast.FunctionDef):
        return node
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return member
    if _is_dataclass(node):
        return None
    bases = (base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
    makers = (_find_maker(classes[name], classes) for name in bases)
    return next((maker for maker in makers if maker is not None), None)


def _declarations(arguments: ast.arguments) -> Iterator[str]:
    """Yield ``name: type = default`` of each argument but ``self``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        if argument.arg != "self":
            yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _is_dataclass(node: ast.ClassDef) -> bool:
    decorators = (getattr(call, "func", call) for call in node.decorator_list)
    return any(getattr(decorator, "id", "") == "dataclass" for decorator in decorators)


def _fields(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, str]:
    """Return ``name: type = default`` of each field, also of bases in the same module."""
    fields: dict[str, str] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields |= _fields(classes[base.id], classes)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            fields[line.target.id] = ast.unparse(line)
    # The marker of keyword-only fields.
    fields.pop("_", None)
    return fields


def documented_items(docstring: str, section: str) -> dict[str, str]:
    """Return the text about each name in a section of a docstring, such as "Args"."""
    entries = re.findall(
        r"^    ([\w, ]+): (.*(?:\n     .*)*)",
        docstring.partition(f"\n{section}:\n")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    return {name: " ".join(text.split()) for name, text in entries}


def write_table() -> None:
    """Write namespaces.json for the installed versions; keep other versions with equal classes."""
    stored, classes = read_table(), make_classes()
    earlier = stored.versions if stored.classes == classes else {}
    versions = {
        name: sorted({*earlier.get(name, ()), release}) for name, release in _installed().items()
    }
    table = {"versions": versions, "classes": classes}
    _TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
