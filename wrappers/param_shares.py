"""Which of several optimizers has which parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from .param_names import NamedParameter, belongs, listed, named_parameters, near_names
from .step import Steps, has_own_train_step


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
        wanted = _child(optimizer, names) if patterns is None else patterns
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


def _child(optimizer: str, names: Iterable[str]) -> list[str]:
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
