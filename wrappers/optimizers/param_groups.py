"""Select parameters by their names in the user's model: for parameter groups with different
options, and for several optimizers.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...registry import ParamwiseSection, Problem, check_paramwise, did_you_mean, get_default
from ..steps.step import ModelWrapper, overrides_train_step

logger = logging.getLogger(__name__)

Options = dict[str, Any]

# The name of the group with the optimizer's own options. Records have its rate as `lr`.
DEFAULT_GROUP = "default"

_WRAPPERS = (DataParallel, DistributedDataParallel, ModelWrapper)
# The child in which torch.compile keeps the original module.
_COMPILED = "_orig_mod"

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORMS_OF_MMENGINE = (_NormBase, nn.GroupNorm, nn.LayerNorm)
# Custom layers, such as LlamaRMSNorm or LayerNorm2d.
_NORM_NAME = re.compile(r"Norm(\dd)?$", re.IGNORECASE)
# Names of biases in torch's layers, including attention and recurrent layers.
_BIAS_NAME = re.compile(r"bias|in_proj_bias|bias_[ih]h_l\d+(_reverse)?")
# Usually the first word of a parameter's kind selects the factor of its weight decay: "norm bias"
# uses norm_decay_mult. With as_mmengine, the kinds "norm bias" and "dwconv bias" use the first of
# two factors that is set. This follows mmengine's code; its docstring says that bias_decay_mult
# does not apply to these kinds.
_DECAYS_OF_MMENGINE = {"norm bias": ["norm", "bias"], "dwconv bias": ["bias", "dwconv"]}


class NamedParameter(NamedTuple):
    """A parameter, its full name and the module that holds it."""

    name: str
    parameter: nn.Parameter
    owner: nn.Module


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return the parameters in the order of their modules, shared ones under each of their names.

    Wrappers inside the model and ``torch.compile`` do not change the names.
    """
    return list(_walk(model, "", ()))


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter of ``model`` by its id; several if modules share it."""
    names: dict[int, list[str]] = {}
    for name, parameter, _ in named_parameters(model):
        names.setdefault(id(parameter), []).append(name)
    return names


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def _belongs(name: str, where: str) -> bool:
    """Return whether a parameter's name matches ``where``, a pattern or the path of a module."""
    return fnmatchcase(name, where) if _is_pattern(where) else f"{name}.".startswith(f"{where}.")


def _near_names(pattern: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with similar names of parameters and modules, or ""."""
    split_names = [name.split(".") for name in names]
    near = dict.fromkeys(
        ".".join(components[:end])
        for components in split_names
        for end in range(len(components), 0, -1)
    )
    if _is_pattern(pattern):
        starred = [re.sub(r"\b\d+\b", "*", name) for name in near]
        near = dict.fromkeys([*starred, *(f"{name}.*" for name in starred)])
    return did_you_mean(pattern, near)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _walk(module: nn.Module, prefix: str, above: tuple[nn.Module, ...]) -> Iterator[NamedParameter]:
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield NamedParameter(prefix + leaf, parameter, module)
    for name, child in module._modules.items():
        # A module may contain a reference to its parent.
        if child is None or child is module or child in above:
            continue
        hidden = name == _COMPILED or (name == "module" and isinstance(module, _WRAPPERS))
        yield from _walk(child, prefix if hidden else f"{prefix}{name}.", (*above, module))


def divide_parameters(
    model: nn.Module, chosen: Mapping[str, Sequence[str] | None]
) -> dict[str, list[NamedParameter]]:
    """Divide the parameters among optimizers; every trained parameter must have exactly one.

    Args:
        model: the model, wrapped or not.
        chosen: for each optimizer's name, a list of patterns (fnmatch on full names) and paths of
            modules. None selects the child of the model, or of its ``net``, with the optimizer's
            name.

    Raises:
        ValueError: a pattern matches nothing, a child does not exist, or a trained parameter
            belongs to no optimizer or to several.
    """
    named = named_parameters(model)
    names = [param.name for param in named]
    shares = {}
    for optimizer, patterns in chosen.items():
        own_patterns = _find_child(optimizer, names) if patterns is None else patterns
        for pattern in own_patterns:
            if not any(_belongs(name, pattern) for name in names):
                near = _near_names(pattern, names)
                raise ValueError(f"{optimizer}: no parameter matches {pattern!r}{near}")
        shares[optimizer] = [
            param for param in named if any(_belongs(param.name, p) for p in own_patterns)
        ]
    _check_exactly_one(named, shares)
    return shares


def check_step_for_several_optimizers(model: nn.Module) -> None:
    """Raise TypeError for a wrapped model whose training step uses one optimizer only."""
    default = ModelWrapper.train_step
    if not isinstance(model, ModelWrapper) or type(model).train_step is not default:
        return
    if not overrides_train_step(model.module):
        name = type(model.module).__name__
        raise TypeError(
            f"{name} must define train_step to use several optimizers, and does not: write "
            f"{name}.train_step(data, optim_wrapper), which calls each of them, for example "
            "optim_wrapper['generator'].update_params(loss)"
        )


def _find_child(optimizer: str, names: Iterable[str]) -> list[str]:
    for path in (optimizer, f"net.{optimizer}"):
        if any(_belongs(name, path) for name in names):
            return [path]
    raise ValueError(
        f"{optimizer}: neither the model nor its net has a child {optimizer!r} with parameters"
        f"{_near_names(optimizer, names)}; list its parameters in `params`"
    )


def _check_exactly_one(
    named: Sequence[NamedParameter], shares: Mapping[str, Sequence[NamedParameter]]
) -> None:
    owners: dict[nn.Parameter, list[str]] = {param.parameter: [] for param in named}
    for optimizer, share in shares.items():
        for parameter in dict.fromkeys(param.parameter for param in share):
            owners[parameter].append(optimizer)
    trained = [param for param in named if param.parameter.requires_grad]
    orphans = [param.name for param in trained if not owners[param.parameter]]
    if orphans:
        raise ValueError(f"no optimizer has {_listed(orphans)}; every trained parameter needs one")
    for param in trained:
        several = owners[param.parameter]
        if len(several) > 1:
            same = [other.name for other in trained if owners[other.parameter] == several]
            raise ValueError(
                f"{' and '.join(several)} both have {_listed(same)}; every parameter must have "
                "exactly one optimizer"
            )


def param_groups(
    model: nn.Module | Sequence[NamedParameter],
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    paramwise: Mapping[str, Any],
    optimizer: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Group the model's parameters by their options; return as few groups as possible.

    ``custom_keys`` has options for the parameters whose names match a key. A key with ``*``, ``?``
    or ``[`` must match the full name (fnmatch); any other key must be contained in the full name.
    Only the longest matching key is used. If none matches, the kind of parameter selects factors:

    - ``bias_lr_mult``: biases outside norm layers
    - ``bias_decay_mult``: the same biases, except biases of depthwise convolutions
    - ``norm_decay_mult``: weights and biases of norm layers
    - ``dwconv_decay_mult``: weights and biases of depthwise convolutions
    - ``flat_decay_mult``: parameters with one dimension, if the factor of their kind is not set

    With ``layer_decay`` and ``layers``, the learning rate of each parameter is multiplied by
    ``layer_decay`` once for each layer above it. Logs show the ``name`` of a group.

    Args:
        model: a model, wrapped or not, or some of its parameters, from ``named_parameters``.
        lr: base value for the factors; default: the default of ``optimizer``.
        weight_decay: the same for weight decay.
        paramwise: a mapping with the factors above, ``layer_decay``, ``layers`` and these keys.
            ``custom_keys``: for each key a mapping with ``lr_mult`` and ``decay_mult``, or absolute
            values of ``lr``, ``weight_decay`` and other arguments of ``optimizer``.
            ``bypass_duplicate``: if a shared parameter would get different options under its
            names, use the first name. ``as_mmengine``: define the kinds of parameters and match
            custom keys as mmengine does (see docs/configs.md).
        optimizer: the optimizer class, for its defaults and further arguments.

    Raises:
        ValueError: an option does not exist or is out of range, a key matches no parameter, a
            factor has no base value, or a shared parameter gets different options.
    """
    problems: list[Problem] = []
    section = check_paramwise(dict(paramwise), optimizer, "paramwise", problems)
    if section is None:
        raise ValueError("; ".join(map(str, problems)))
    base = {"lr": lr, "weight_decay": weight_decay}
    for name, value in base.items():
        if value is None and optimizer is not None:
            base[name] = get_default(optimizer, name)
    named = named_parameters(model) if isinstance(model, nn.Module) else list(model)
    rules = _Rules(section, base)
    rules.check_matches([param.name for param in named])
    if section.layer_decay is not None:
        rules.levels = _levels([param.name for param in named], section.layers)
    return _grouped(named, rules, section.bypass_duplicate)


class _Rules:
    """Find the options of a parameter; ``base`` has the values that the factors multiply."""

    def __init__(self, section: ParamwiseSection, base: Mapping[str, float | None]) -> None:
        self.section = section
        self.base = base
        # Longest first, because the longest matching key is used.
        self.keys = sorted(sorted(section.custom_keys), key=len, reverse=True)
        # For each parameter the number of layers above it, and its layer; only with layer_decay.
        self.levels: dict[str, tuple[int, str]] = {}

    def check_matches(self, names: Sequence[str]) -> None:
        for key in self.keys:
            if not any(self._matches(key, name) for name in names):
                near = _near_names(key, names)
                problem = f"paramwise.custom_keys.{key}: no parameter matches{near}"
                if not self.section.as_mmengine:
                    raise ValueError(problem)
                logger.warning("%s", problem)

    def get_options(self, param: NamedParameter) -> tuple[str, Options]:
        """Return a text that names the source of a parameter's options, and the options."""
        why, options = self._own_options(param)
        if param.name not in self.levels:
            return why, options
        above, layer = self.levels[param.name]
        suffix = "" if options == _drop_none(dict(self.base)) else f" {why}"
        key = self._matching_key(param.name)
        # layer_decay does not change an absolute rate of a custom key.
        if key is None or "lr" not in self.section.custom_keys[key]:
            rate = options.get("lr")
            if rate is None:
                raise ValueError("paramwise: layer_decay multiplies lr, which is not set")
            options = {**options, "lr": rate * (self.section.layer_decay or 0.0) ** above}
        return f"{layer}{suffix}", options

    def _matching_key(self, name: str) -> str | None:
        return next((key for key in self.keys if self._matches(key, name)), None)

    def _own_options(self, param: NamedParameter) -> tuple[str, Options]:
        """Return the text and the options before ``layer_decay``."""
        key = self._matching_key(param.name)
        if key is not None:
            return key, self._custom(key)
        kind = _kind(param, as_mmengine=self.section.as_mmengine)
        lr_mult = self.section.bias_lr_mult if kind in ("bias", "dwconv bias") else None
        kind, decay_mult = self._get_decay(kind, is_flat=param.parameter.ndim == 1)
        lr = self._product("lr", lr_mult, "bias_lr_mult")
        decay = self._product("weight_decay", decay_mult, f"{kind} decay")
        return kind or DEFAULT_GROUP, _drop_none({"lr": lr, "weight_decay": decay})

    def _get_decay(self, kind: str, *, is_flat: bool) -> tuple[str, float | None]:
        """Return the factor of a parameter's weight decay, with the kind that decided it."""
        why = kind.removesuffix(" bias") if kind.startswith("norm") else kind
        options = kind.split()[:1]
        if self.section.as_mmengine:
            options = _DECAYS_OF_MMENGINE.get(kind, options)
        for option in options:
            factor = getattr(self.section, f"{option}_decay_mult")
            if factor is not None:
                return why, factor
        if is_flat and self.section.flat_decay_mult is not None:
            return f"{why} flat".lstrip(), self.section.flat_decay_mult
        return why, None

    def _matches(self, key: str, name: str) -> bool:
        if self.section.as_mmengine:
            # mmengine puts a dot before the name of a parameter of the model itself.
            return key in (name if "." in name else f".{name}")
        return fnmatchcase(name, key) if _is_pattern(key) else key in name

    def _custom(self, key: str) -> Options:
        options, where = dict(self.section.custom_keys[key]), f"custom_keys.{key}"
        lr = self._product("lr", options.pop("lr_mult", None), f"{where}.lr_mult")
        decay = self._product(
            "weight_decay", options.pop("decay_mult", None), f"{where}.decay_mult"
        )
        return _drop_none({"lr": lr, "weight_decay": decay, **options})

    def _product(self, name: str, factor: float | None, setting: str) -> float | None:
        base = self.base[name]
        if factor is None:
            return base
        if base is None:
            raise ValueError(f"paramwise: {setting} multiplies {name}, which is not set")
        return base * factor


def _levels(names: Sequence[str], layers: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return for each parameter the number of layers above it, and the name of its layer.

    The parameters before the first layer, such as an embedding, form the lowest layer "input".
    Those after the last layer, such as a head, form the highest layer "output". A parameter between
    two layers belongs to the layer before it.

    Args:
        layers: paths of modules from the input to the output; a pattern is one layer for each
            module that it matches, in the model's order.
    """
    layers_by_name = {name: _find_layer(name, layers) for name in names}
    for at, pattern in enumerate(layers):
        if not any(layer is not None and layer[0] == at for layer in layers_by_name.values()):
            near = _near_names(pattern, names)
            raise ValueError(f"paramwise.layers: no module matches {pattern!r}{near}")
    ordered = dict.fromkeys([p for p in layers_by_name.values() if p is not None])
    in_order = sorted(ordered, key=lambda layer: layer[0])
    last_index = max(at for at, name in enumerate(names) if layers_by_name[name] is not None)
    levels: dict[str, tuple[int, str]] = {}
    level, layer = 0, "input"
    for at, name in enumerate(names):
        entry = layers_by_name[name]
        if entry is not None:
            level, layer = in_order.index(entry) + 1, entry[1]
        elif at > last_index:
            level, layer = len(in_order) + 1, "output"
        levels[name] = level, layer
    top = max(level for level, _ in levels.values())
    return {name: (top - level, layer) for name, (level, layer) in levels.items()}


def _find_layer(name: str, layers: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the first pattern that matches a module of a parameter, and its path."""
    components = name.split(".")
    paths = [".".join(components[:end]) for end in range(1, len(components) + 1)]
    for at, pattern in enumerate(layers):
        for path in paths:
            if path == pattern or (_is_pattern(pattern) and fnmatchcase(path, pattern)):
                return at, path
    return None


def _kind(param: NamedParameter, *, as_mmengine: bool) -> str:
    """Return which of "norm", "dwconv" and "bias" a parameter is, separated by spaces, or ""."""
    owner, leaf = param.owner, param.name.rpartition(".")[2]
    if as_mmengine:
        is_norm = isinstance(owner, _NORMS_OF_MMENGINE)
        is_dwconv = isinstance(owner, nn.Conv2d) and owner.groups == owner.in_channels
        is_bias = leaf == "bias"
    else:
        # Includes bases, because checkpointed blocks have a subclass of the user's class.
        names = [] if owner._modules else [cls.__name__ for cls in type(owner).__mro__]
        is_norm = isinstance(owner, _NORMS) or any(map(_NORM_NAME.search, names))
        is_dwconv = isinstance(owner, _ConvNd) and owner.groups == owner.in_channels > 1
        is_bias = _BIAS_NAME.fullmatch(leaf) is not None
    flags = {"norm": is_norm, "dwconv": is_dwconv, "bias": is_bias}
    return " ".join(flag for flag, holds in flags.items() if holds)


def _drop_none(options: Options) -> Options:
    return {name: value for name, value in options.items() if value is not None}


def _grouped(
    named: Sequence[NamedParameter], rules: _Rules, bypass_duplicate: bool
) -> list[dict[str, Any]]:
    """Return the groups in the order of their first parameters."""
    groups: dict[str, tuple[list[nn.Parameter], dict[str, None], Options]] = {}
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for param in named:
        why, options = rules.get_options(param)
        alike = repr(sorted(options.items()))
        first_name, first_alike = owners.setdefault(param.parameter, (param.name, alike))
        if first_name != param.name:
            if first_alike != alike and not bypass_duplicate:
                raise ValueError(
                    f"{first_name} and {param.name} are one parameter, but paramwise gives them "
                    "different options; give both the same, or set bypass_duplicate: true to use "
                    "the options of the first"
                )
            continue
        params, reasons, _ = groups.setdefault(alike, ([], {}, options))
        params.append(param.parameter)
        reasons[why] = None
    name_counts: Counter[str] = Counter()
    described = []
    for params, reasons, options in groups.values():
        more = [f"{len(reasons) - 3} more"] if len(reasons) > 3 else []
        name = "+".join([*list(reasons)[:3], *more])
        if DEFAULT_GROUP in reasons:
            # Other parameters in this group have the optimizer's own options as well.
            name = DEFAULT_GROUP
        # A custom key may have the same name as a kind of parameters.
        name_counts[name] += 1
        name = name if name_counts[name] == 1 else f"{name} {name_counts[name]}"
        described.append({"params": params, **options, "name": name})
        settings = ", ".join(f"{key}={value}" for key, value in options.items())
        count = sum(parameter.numel() for parameter in params)
        logger.info("parameter group %s: %d parameters, %s", name, count, settings)
    return described
