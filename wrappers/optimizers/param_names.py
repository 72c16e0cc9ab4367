"""The user's own names of parameters, whatever the model is wrapped in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...registry import did_you_mean
from ..steps.step import Steps, has_own_train_step

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


def share_parameters(
    model: nn.Module, chosen: Mapping[str, Sequence[str] | None]
) -> dict[str, list[NamedParameter]]:
    """Return the parameters of each optimizer, those that are trained in exactly one.

    Args:
        model: wrapped or not; the names are the user's own.
        chosen: by optimizer, patterns (fnmatch on full names) and paths of modules; None for
            the child of the model, or of its `net`, that has the optimizer's name.

    Raises:
        ValueError: a pattern matches nothing, there is no such child, or a parameter that is
            trained belongs to no optimizer or to several; names the first ones.
    """
    named = named_parameters(model)
    names = [one.name for one in named]
    shares = {}
    for optimizer, patterns in chosen.items():
        wanted = _child_of(optimizer, names) if patterns is None else patterns
        for pattern in wanted:
            if not any(belongs(name, pattern) for name in names):
                near = near_names(pattern, names)
                raise ValueError(f"{optimizer}: no parameter matches {pattern!r}{near}")
        shares[optimizer] = [
            one for one in named if any(belongs(one.name, pattern) for pattern in wanted)
        ]
    _refuse_uneven(named, shares)
    return shares


def refuse_single_step(model: nn.Module) -> None:
    """Raise TypeError for a wrapped model whose training step knows of one optimizer only."""
    if not isinstance(model, Steps) or type(model).train_step is not Steps.train_step:
        return
    if not has_own_train_step(model.module):
        name = type(model.module).__name__
        raise TypeError(
            f"{name} has no train_step of its own, and that of its wrapper updates by one "
            f"optimizer: write {name}.train_step(data, optim_wrapper), which updates by each, "
            "as in optim_wrapper['generator'].update_params(loss)"
        )


def _child_of(optimizer: str, names: Iterable[str]) -> list[str]:
    for path in (optimizer, f"net.{optimizer}"):
        if any(belongs(name, path) for name in names):
            return [path]
    raise ValueError(
        f"{optimizer}: neither the model nor its net has a child {optimizer!r} with parameters"
        f"{near_names(optimizer, names)}; `params` says which ones it has"
    )


def _refuse_uneven(
    named: Sequence[NamedParameter], shares: Mapping[str, Sequence[NamedParameter]]
) -> None:
    owners: dict[int, dict[str, None]] = {id(one.parameter): {} for one in named}
    for optimizer, share in shares.items():
        for one in share:
            owners[id(one.parameter)][optimizer] = None
    trained = [one for one in named if one.parameter.requires_grad]
    orphans = [one.name for one in trained if not owners[id(one.parameter)]]
    if orphans:
        raise ValueError(f"no optimizer has {listed(orphans)}; every parameter needs one")
    for one in trained:
        several = list(owners[id(one.parameter)])
        if len(several) > 1:
            same = [x.name for x in trained if list(owners[id(x.parameter)]) == several]
            raise ValueError(
                f"{' and '.join(several)} both have {listed(same)}; every parameter needs one "
                "optimizer"
            )
