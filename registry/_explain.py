"""The text about a name that no registry knows."""

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from .definitions import find_definitions
from .errors import did_you_mean
from .imports import ModuleSources, import_path

_FEW = 12


class Table(Protocol):
    """What the text needs to know of a registry."""

    name: str
    scope: str
    sources: ModuleSources

    @property
    def parent(self) -> "Table | None":
        """The registry asked next."""
        ...

    def names(self) -> list[str]:
        """Return what can be looked up."""
        ...

    def family(self) -> Iterable["Table"]:
        """Yield the registry and all its relatives."""
        ...


def explain_miss(registry: Table, key: str) -> str:
    """Return one line: what was looked for and where, near names, failed imports, definitions."""
    parts = [_looked_for(registry, key), *_import_failure(registry, key)]
    for member in _asked(registry):
        parts += [
            f"{name} failed to import: {why}" for name, why in member.sources.failures.items()
        ]
    parts += [definition.advice() for definition in find_definitions(key.rpartition(".")[2])]
    return "; ".join(parts)


def _looked_for(registry: Table, key: str) -> str:
    family, asked = list(registry.family()), _asked(registry)
    candidates = [name for member in asked for name in member.names()]
    for member in family:
        if member not in asked:
            candidates += [f"{member.scope}.{name}" for name in member.names()]
    scopes = ", ".join(member.scope for member in family)
    label = f"scope {scopes}" if len(family) == 1 else f"scopes {scopes}"
    text = f"{key} is not in the registry {registry.name} ({label})"
    hint = did_you_mean(key, candidates) or did_you_mean(key.rpartition(".")[2], candidates)
    if not hint and 0 < len(candidates) <= _FEW:
        hint = f"; it has {', '.join(candidates)}"
    return text + hint


def _import_failure(registry: Table, key: str) -> Iterator[str]:
    package = key.partition(".")[0]
    scopes = {member.scope for member in registry.family()}
    if "." not in key or (package in scopes and package not in sys.modules):
        return
    try:
        import_path(key)
    except ImportError as error:
        yield str(error)
    else:
        yield f"{key} can be imported but is neither a class nor a function"


def _asked(registry: Table) -> list[Table]:
    chain = [registry]
    while (parent := chain[-1].parent) is not None:
        chain.append(parent)
    return chain
