"""The user's own names of parameters, whatever the model is wrapped in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..registry import did_you_mean
from .step import Steps

_WRAPPERS = (DataParallel, DistributedDataParallel, Steps)
# The child in which torch.compile keeps the module that it was given.
_COMPILED = "_orig_mod"


class NamedParameter(NamedTuple):
    """A parameter, its full name and the module that holds it."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return the parameters in the order of their modules; a shared one under each name.

    Wrappers inside the model and `torch.compile` add nothing to the names.
    """
    return list(_walk(model, "", ()))


def is_pattern(text: str) -> bool:
    """Whether `text` has wildcards, as fnmatch knows them."""
    return any(sign in text for sign in "*?[")


def belongs(name: str, where: str) -> bool:
    """Whether a parameter's name fits a pattern, or lies in the module at a path."""
    if is_pattern(where):
        return fnmatchcase(name, where)
    return name == where or name.startswith(f"{where}.")


def near_names(wanted: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with parameters and modules near `wanted`, or ""."""
    near = dict.fromkeys(prefix for name in names for prefix in _prefixes(name))
    if is_pattern(wanted):
        starred = [re.sub(r"\b\d+\b", "*", one) for one in near]
        near = dict.fromkeys([*starred, *(f"{one}.*" for one in starred)])
    return did_you_mean(wanted, near)


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _walk(module: nn.Module, prefix: str, above: tuple[nn.Module, ...]) -> Iterator[NamedParameter]:
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield NamedParameter(prefix + leaf, parameter, module)
    for name, child in module._modules.items():
        # A module may know the one that holds it.
        if child is None or child is module or child in above:
            continue
        hidden = name == _COMPILED or (name == "module" and isinstance(module, _WRAPPERS))
        yield from _walk(child, prefix if hidden else f"{prefix}{name}.", (*above, module))


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
