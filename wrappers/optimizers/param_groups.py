"""Learning rates, weight decays and other options by parameter."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...registry import ParamwiseSection, Problem, check_paramwise, default_of
from .param_names import NamedParameter, is_pattern, named_parameters, near_names

logger = logging.getLogger(__name__)

Options = dict[str, Any]

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORMS_OF_MMENGINE = (_NormBase, nn.GroupNorm, nn.LayerNorm)
# Layers of the user's own, such as LlamaRMSNorm or LayerNorm2d.
_NORM_NAME = re.compile(r"Norm(\dd)?$", re.IGNORECASE)
# How torch's layers call theirs, attention and recurrent ones included.
_BIAS_NAME = re.compile(r"bias|in_proj_bias|bias_[ih]h_l\d+(_reverse)?")
# By kind of parameter, the options of which the first that is set decides its decay.
_DECAYS = {
    "norm": ("norm",),
    "norm bias": ("norm",),
    "dwconv": ("dwconv",),
    "dwconv bias": ("dwconv",),
    "bias": ("bias",),
}
# As mmengine's code has it; its docstring leaves biases of norm layers and of depthwise
# convolutions out of `bias_decay_mult`.
_DECAYS_OF_MMENGINE = {
    **_DECAYS,
    "norm bias": ("norm", "bias"),
    "dwconv bias": ("bias", "dwconv"),
}


def param_groups(
    model: nn.Module | Sequence[NamedParameter],
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    paramwise: Mapping[str, Any],
    optimizer: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the model's parameters in as few groups as have options of their own.

    The names are the user's own under every wrapper. A custom key is looked for in the full
    name, or, with `*`, `?` or `[` in it, must fit the whole of it (fnmatch); the longest one
    that does decides alone. Other options go by the kind of parameter: biases outside norm
    layers (`bias_lr_mult`; `bias_decay_mult` leaves out depthwise convolutions too), norm
    layers, depthwise convolutions, and those with one dimension (`flat_decay_mult`) that none
    of the three decided. Each group has a `name`, which the log records show.

    Args:
        model: wrapped or not; or some of its parameters, from `named_parameters`.
        lr: what `lr_mult` multiplies; default: that of `optimizer`.
        weight_decay: what `decay_mult` multiplies; default: that of `optimizer`.
        paramwise: `custom_keys` ({key: {lr_mult, decay_mult}}, or absolute `lr`,
            `weight_decay` and further arguments of `optimizer`), `bias_lr_mult`,
            `bias_decay_mult`, `norm_decay_mult`, `flat_decay_mult`, `dwconv_decay_mult`;
            `bypass_duplicate`: the first name of a shared parameter counts, where its
            names would give it different options; `as_mmengine`: kinds of parameters and
            custom keys as in mmengine's code (see docs/configs.md).
        optimizer: a class whose defaults and further arguments count.

    Raises:
        ValueError: an option does not exist or is out of range, a key matches no parameter,
            there is nothing to multiply, or a shared parameter gets different options.
    """
    problems: list[Problem] = []
    section = check_paramwise(dict(paramwise), optimizer, "paramwise", problems)
    if section is None:
        raise ValueError("; ".join(map(str, problems)))
    if optimizer is not None:
        lr = default_of(optimizer, "lr") if lr is None else lr
        weight_decay = (
            default_of(optimizer, "weight_decay") if weight_decay is None else weight_decay
        )
    named = named_parameters(model) if isinstance(model, nn.Module) else list(model)
    rules = _Rules(section, lr, weight_decay)
    rules.refuse_unmatched([one.name for one in named])
    return _grouped(named, rules, section.bypass_duplicate)


@dataclass(frozen=True)
class _Rules:
    """From a parameter to its options."""

    section: ParamwiseSection
    lr: float | None
    weight_decay: float | None

    @cached_property
    def keys(self) -> list[str]:
        """The custom keys, those that go first in front."""
        return sorted(sorted(self.section.custom_keys), key=len, reverse=True)

    def refuse_unmatched(self, names: Sequence[str]) -> None:
        """Raise ValueError for a custom key that no parameter has in its name."""
        for key in self.keys:
            if any(self._matches(key, name) for name in names):
                continue
            said = f"paramwise.custom_keys.{key}: no parameter matches{near_names(key, names)}"
            if not self.section.as_mmengine:
                raise ValueError(said)
            logger.warning("%s", said)

    def options_of(self, one: NamedParameter) -> tuple[str, Options]:
        """Return why a parameter has its options, and the options."""
        for key in self.keys:
            if self._matches(key, one.name):
                return key, self._custom(key)
        kind = _kind(one, as_mmengine=self.section.as_mmengine)
        lr_mult = self.section.bias_lr_mult if kind in ("bias", "dwconv bias") else None
        kind, decay_mult = self._decay_of(kind, is_flat=one.parameter.ndim == 1)
        options = {
            "lr": self._product("lr", lr_mult, "bias_lr_mult"),
            "weight_decay": self._product("weight_decay", decay_mult, f"{kind} decay"),
        }
        return kind or "other", _without_none(options)

    def _decay_of(self, kind: str, *, is_flat: bool) -> tuple[str, float | None]:
        """Return why a parameter has its decay, and what multiplies it."""
        decays = _DECAYS_OF_MMENGINE if self.section.as_mmengine else _DECAYS
        why = kind.removesuffix(" bias") if kind.startswith("norm") else kind
        for option in decays.get(kind, ()):
            multiple = getattr(self.section, f"{option}_decay_mult")
            if multiple is not None:
                return why, multiple
        if is_flat and self.section.flat_decay_mult is not None:
            return f"{why} flat".lstrip(), self.section.flat_decay_mult
        return why, None

    def _matches(self, key: str, name: str) -> bool:
        if self.section.as_mmengine:
            # There a parameter of the model itself has a dot before its name.
            return key in (name if "." in name else f".{name}")
        return fnmatchcase(name, key) if is_pattern(key) else key in name

    def _custom(self, key: str) -> Options:
        given = dict(self.section.custom_keys[key])
        where = f"custom_keys.{key}"
        lr_mult, decay_mult = given.pop("lr_mult", None), given.pop("decay_mult", None)
        options = {
            "lr": self._product("lr", lr_mult, f"{where}.lr_mult"),
            "weight_decay": self._product("weight_decay", decay_mult, f"{where}.decay_mult"),
        }
        return _without_none({**options, **given})

    def _product(self, name: str, multiple: float | None, setting: str) -> float | None:
        base: float | None = getattr(self, name)
        if multiple is None:
            return base
        if base is None:
            raise ValueError(f"paramwise: {setting} multiplies {name}, which is not set")
        return base * multiple


def _kind(one: NamedParameter, *, as_mmengine: bool) -> str:
    """Return a key of the decays by kind, or ""."""
    owner, leaf = one.owner, one.name.rpartition(".")[2]
    if as_mmengine:
        is_norm = isinstance(owner, _NORMS_OF_MMENGINE)
        is_dwconv = isinstance(owner, nn.Conv2d) and owner.groups == owner.in_channels
        is_bias = leaf == "bias"
    else:
        is_norm = isinstance(owner, _NORMS) or _named_as_norm(owner)
        is_dwconv = isinstance(owner, _ConvNd) and owner.groups == owner.in_channels > 1
        is_bias = _BIAS_NAME.fullmatch(leaf) is not None
    parts = {"norm": is_norm, "dwconv": is_dwconv, "bias": is_bias}
    return " ".join(part for part, holds in parts.items() if holds)


def _named_as_norm(owner: nn.Module) -> bool:
    if owner._modules:
        return False
    # The bases too: a class may have been derived from the user's on the way.
    return any(_NORM_NAME.search(cls.__name__) for cls in type(owner).__mro__)


def _without_none(options: Options) -> Options:
    return {name: value for name, value in options.items() if value is not None}


def _grouped(
    named: Sequence[NamedParameter], rules: _Rules, bypass_duplicate: bool
) -> list[dict[str, Any]]:
    """Return the groups in the order of their first parameters."""
    groups: dict[str, tuple[list[nn.Parameter], dict[str, None], Options]] = {}
    seen: dict[int, tuple[str, str]] = {}
    for one in named:
        why, options = rules.options_of(one)
        alike = repr(sorted(options.items()))
        first, first_alike = seen.setdefault(id(one.parameter), (one.name, alike))
        if first != one.name:
            if first_alike != alike and not bypass_duplicate:
                raise ValueError(
                    f"{first} and {one.name} are one parameter, but paramwise gives them "
                    "different options; give both the same, or set bypass_duplicate: true and "
                    "the first counts"
                )
            continue
        params, reasons, _ = groups.setdefault(alike, ([], {}, options))
        params.append(one.parameter)
        reasons[why] = None
    taken: dict[str, int] = {}
    described = []
    for params, reasons, options in groups.values():
        more = [f"{len(reasons) - 3} more"] if len(reasons) > 3 else []
        name = "+".join([*list(reasons)[:3], *more])
        # A custom key may be called as one of our kinds of parameters.
        taken[name] = taken.get(name, 0) + 1
        name = name if taken[name] == 1 else f"{name} {taken[name]}"
        described.append(_described({"params": params, **options, "name": name}))
    return described


def _described(group: dict[str, Any]) -> dict[str, Any]:
    options = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "name"))
    count = sum(parameter.numel() for parameter in group["params"])
    logger.info("parameter group %s: %d parameters, %s", group["name"], count, options)
    return group
