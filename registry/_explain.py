"""The text about a name that no registry knows."""

import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from .definitions import find_definitions
from .errors import RegistryKeyError, did_you_mean, shortened
from .imports import FailedImportError, ModuleSources, import_path

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
        """Return what can be looked up and is of the registry's kind."""
        ...

    def family(self) -> Iterable["Table"]:
        """Yield the registry and all its relatives."""
        ...


def missed(registry: Table, key: str) -> RegistryKeyError:
    """Return the error that says on one line what was looked for and where.

    A module that fails to import comes first, and is the cause: nothing else may be wrong. Else
    near names follow, and where something of that name is defined.
    """
    first: list[ImportError] = []
    remarks: list[str] = []
    is_other_kind = False
    if _may_be_path(registry, key):
        try:
            import_path(key)
        except FailedImportError as error:
            first = [error]
        except ImportError as error:
            remarks = [shortened(str(error), 200)]
        else:
            is_other_kind = True
            remarks = [f"{shortened(key)} can be imported but is neither a class nor a function"]
    looked_for = _looked_for(registry, key)
    if not first and not is_other_kind:
        looked_for += _near_names(registry, key)
    for member in (registry, *ancestors(registry)):
        for name, failure in member.sources.failures.items():
            # What is to register itself must be there; the packages behind a namespace may lack.
            first += [failure] if name in member.sources.locations else []
            remarks += [] if name in member.sources.locations else [str(failure)]
    definitions = [one.advice() for one in find_definitions(key.rpartition(".")[2])]
    missing = RegistryKeyError("; ".join([*map(str, first), looked_for, *remarks, *definitions]))
    missing.__cause__ = first[0] if first else None
    return missing


def _near_names(registry: Table, key: str) -> str:
    """Return "; did you mean A or B?", or all names where they are few, or ""."""
    asked = [registry, *ancestors(registry)]
    candidates = [name for member in asked for name in member.names()]
    for member in registry.family():
        if member not in asked:
            candidates += [f"{member.scope}.{name}" for name in member.names()]
    hint = did_you_mean(key, candidates) or did_you_mean(key.rpartition(".")[2], candidates)
    if not hint and 0 < len(candidates) <= _FEW:
        hint = f"; it has {', '.join(candidates)}"
    return hint


def ancestors(registry: Table) -> Iterator[Table]:
    """Yield the parent of a registry, its parent, and so on up to the root."""
    while (parent := registry.parent) is not None:
        registry = parent
        yield registry


def _looked_for(registry: Table, key: str) -> str:
    scopes = [member.scope for member in registry.family()]
    related = f" (scopes {', '.join(scopes)})" if len(scopes) > 1 else ""
    return f"{shortened(key)} is not in the {registry.scope}::{registry.name} registry{related}"


def _may_be_path(registry: Table, key: str) -> bool:
    package, dot, _ = key.partition(".")
    scopes = {member.scope for member in registry.family()}
    return bool(dot) and (package not in scopes or package in sys.modules)
