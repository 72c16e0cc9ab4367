"""Configured weight initialisation: ``init_cfg``, as mmengine documents it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from ...registry import did_you_mean
from ..torch_functions import check_options, option_names

logger = logging.getLogger(__name__)

InitSettings = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class BaseModule(nn.Module):
    """A module whose weight initialisation can be configured.

    Args:
        init_cfg: see ``initialize``. It is also an attribute, which a subclass may set.

    Attributes:
        is_init: whether ``init_weights`` has been called. Set it after loading weights, so that the
            ``init_weights`` of an outer module leaves this one as it is.
    """

    # Its settings have a ``type``, but the registry does not build them.
    config_plain: tuple[str, ...] = ("init_cfg",)

    def __init__(self, init_cfg: InitSettings | None = None) -> None:
        super().__init__()
        _parse(init_cfg)
        self.init_cfg = init_cfg
        self.is_init = False

    def init_weights(self) -> None:
        """Initialise by ``init_cfg``, then call ``init_weights`` of the submodules.

        Submodules whose ``is_init`` is true are skipped, with all that they contain. Pretrained
        weights are loaded last. A second call only logs a warning.

        Raises:
            TypeError, ValueError, FileNotFoundError: see ``initialize``.
        """
        if self.is_init:
            logger.warning("init_weights of %s has been called more than once", type(self).__name__)
            return
        entries = _parse(self.init_cfg)
        for entry in entries:
            if entry.kind != _PRETRAINED:
                entry.apply(self)
        _initialise_inside(self)
        for entry in entries:
            if entry.kind == _PRETRAINED:
                entry.apply(self)
        self.is_init = True


def initialize(module: nn.Module, init_cfg: InitSettings) -> None:
    """Initialise weights and biases inside ``module``.

    Each mapping of ``init_cfg`` has these keys:

    - ``type``, with its arguments: Constant (``val``), Normal (``mean``, ``std``), TruncNormal
      (``mean``, ``std``, ``a``, ``b``), Uniform (``a``, ``b``), Xavier (``gain``,
      ``distribution``), Kaiming (``a``, ``mode``, ``nonlinearity``, ``distribution``),
      Caffe2Xavier or Pretrained.
    - ``bias``, the value of every bias (default: 0), or ``bias_prob``, a probability whose logit is
      that value.
    - ``layer``: the class names of the layers to initialise. Subclasses are included.
    - ``override``: a list of mappings, each with the ``name`` of a submodule. All layers of this
      submodule, whatever their class, are initialised by the other keys of its mapping, or by the
      outer mapping if it has only a name. An override takes no ``layer`` or ``override``.

    Pretrained takes none of ``bias``, ``layer`` and ``override``. It takes ``checkpoint``, a file
    that contains only weights, and ``prefix``: only weights whose names begin with the prefix are
    loaded, under the rest of the name.

    Args:
        init_cfg: one mapping, or several that are applied in order.

    Raises:
        TypeError: ``init_cfg`` is not a mapping or a list of mappings, or has an argument that the
            type does not take.
        ValueError: the type or a submodule is unknown, or the file has no weights of the module.
        FileNotFoundError: the file does not exist.
    """
    for entry in _parse(init_cfg):
        entry.apply(module)


@torch.no_grad()
def _trunc_normal(
    weight: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    # Uses the inverse distribution function. torch's function draws again until all values are
    # between a and b, which can take minutes if few are.
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    weight.uniform_(low, high).erfinv_()
    return weight.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


def _xavier(weight: Tensor, gain: float = 1.0, distribution: str = "normal") -> Tensor:
    return _function("xavier", distribution)(weight, gain=gain)


def _kaiming(
    weight: Tensor,
    a: float = 0.0,
    mode: str = "fan_out",
    nonlinearity: str = "relu",
    distribution: str = "normal",
) -> Tensor:
    fill = _function("kaiming", distribution)
    return fill(weight, a=a, mode=mode, nonlinearity=nonlinearity)


def _caffe2_xavier(weight: Tensor) -> Tensor:
    # The bound is sqrt(3 / fan_in).
    return init.kaiming_uniform_(weight, a=1, mode="fan_in", nonlinearity="leaky_relu")


def _function(method: str, distribution: str) -> Callable[..., Tensor]:
    if distribution not in ("normal", "uniform"):
        raise ValueError(f"distribution must be 'normal' or 'uniform', got {distribution!r}")
    function: Callable[..., Tensor] = getattr(init, f"{method}_{distribution}_")
    return function


def _load(
    module: nn.Module, checkpoint: str, prefix: str | None = None, map_location: Any = "cpu"
) -> None:
    try:
        loaded = torch.load(checkpoint, map_location=map_location, weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{checkpoint} must contain only weights, but it contains other objects, and loading "
            "them could run any code. If you trust the file, save "
            'torch.load(path, weights_only=False)["state_dict"] to another file and load that'
        ) from error
    weights: Any = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else {}
    if prefix:
        start = prefix.rstrip(".") + "."
        weights = {
            k.removeprefix(start): weight for k, weight in weights.items() if k.startswith(start)
        }
    if module.state_dict().keys().isdisjoint(weights):
        where = f" under {prefix!r}" if prefix else ""
        raise ValueError(f"{checkpoint} has no weights of {type(module).__name__}{where}")
    missing, unexpected = module.load_state_dict(weights, strict=False)
    if missing or unexpected:
        logger.warning(
            "%s: not in the file: %s; not in the model: %s", checkpoint, missing, unexpected
        )


_PRETRAINED = "Pretrained"
_FILLS: dict[str, Callable[..., Any]] = {
    "Constant": init.constant_,
    "Normal": init.normal_,
    "TruncNormal": _trunc_normal,
    "Uniform": init.uniform_,
    "Xavier": _xavier,
    "Kaiming": _kaiming,
    "Caffe2Xavier": _caffe2_xavier,
    _PRETRAINED: _load,
}
_REQUIRED = {"Constant": "val", _PRETRAINED: "checkpoint"}


@dataclass(frozen=True)
class _Entry:
    """A checked mapping of ``init_cfg``, or of its ``override`` for the submodule ``name``."""

    kind: str
    options: Mapping[str, Any]
    bias: float
    layers: frozenset[str]
    name: str | None = None

    def apply(self, module: nn.Module) -> None:
        target = module if self.name is None else _submodule(module, self.name)
        if self.kind == _PRETRAINED:
            _load(target, **self.options)
            return
        for child in target.modules():
            names = {base.__name__ for base in type(child).__mro__}
            if self.name is not None or self.layers & names:
                self._fill(child)

    def _fill(self, module: nn.Module) -> None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, Tensor):
            _FILLS[self.kind](weight, **self.options)
        if isinstance(bias, Tensor):
            init.constant_(bias, self.bias)


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        children = [child for child, _ in module.named_children()]
        raise ValueError(
            f"module did not have attribute {name}, the name of an override in init_cfg; "
            f"{type(module).__name__} has {children}"
        ) from None


def _parse(init_cfg: InitSettings | None) -> list[_Entry]:
    """Return the entries in the order in which they apply: each before its overrides."""
    settings = _mappings("init_cfg", () if init_cfg is None else init_cfg)
    return [entry for setting in settings for entry in _parse_one(setting)]


def _mappings(name: str, given: Any) -> list[Mapping[str, Any]]:
    entries = [given] if isinstance(given, Mapping) else given
    is_list = isinstance(entries, Sequence) and not isinstance(entries, str)
    if not is_list or not all(isinstance(one, Mapping) for one in entries):
        raise TypeError(f"{name} must be a dict or a list of dict, but got {given!r}")
    return list(entries)


def _parse_one(cfg: Mapping[str, Any]) -> list[_Entry]:
    given = dict(cfg)
    kind = given.pop("type", None)
    if kind not in _FILLS:
        hint = did_you_mean(str(kind), _FILLS)
        raise ValueError(f"type of init_cfg must be one of {', '.join(_FILLS)}, got {kind!r}{hint}")
    layers: Any = ()
    overrides: Any = ()
    allowed = [name for name in option_names(_FILLS[kind])[1:] if name != "generator"]
    if kind != _PRETRAINED:
        layers, overrides = given.pop("layer", None) or (), given.pop("override", None) or ()
        allowed += ["bias", "bias_prob"]
    check_options(f"init_cfg of type {kind!r}", given, allowed)
    if kind in _REQUIRED and _REQUIRED[kind] not in given:
        raise TypeError(f"init_cfg of type {kind!r} needs {_REQUIRED[kind]!r}")
    layers = (layers,) if isinstance(layers, str) else layers
    if not isinstance(layers, Sequence) or not all(isinstance(name, str) for name in layers):
        raise TypeError(f"layer must be a str or a list of str, but got {layers!r}")
    outer = _Entry(kind, given, _pop_bias(given), frozenset(layers))
    return [outer, *(_parse_override(one, outer) for one in _mappings("override", overrides))]


def _parse_override(cfg: Mapping[str, Any], outer: _Entry) -> _Entry:
    given = dict(cfg)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f'`override` must contain the key "name", but got {dict(cfg)}')
    if not given:
        return replace(outer, name=name)
    if "type" not in given:
        # mmengine raises the same message.
        raise ValueError(f'`override` need "type" key, but got {given}')
    for key in ("layer", "override"):
        if key in given:
            raise TypeError(
                f"the override of {name!r} initialises all layers inside {name!r} and takes no "
                f"{key!r}: remove it, or use another mapping in the list of init_cfg"
            )
    return replace(_parse_one(given)[0], name=name)


def _pop_bias(options: dict[str, Any]) -> float:
    """Remove ``bias`` and ``bias_prob`` from ``options``; return the value of the biases."""
    bias, probability = options.pop("bias", 0.0), options.pop("bias_prob", None)
    if not isinstance(bias, (int, float)):
        raise TypeError(f"bias must be a number, but got {bias!r}")
    if probability is None:
        return bias
    if not isinstance(probability, float) or not 0 < probability < 1:
        raise ValueError(f"bias_prob must be between 0 and 1, got {probability!r}")
    return -math.log((1 - probability) / probability)


def _initialise_inside(module: nn.Module) -> None:
    """Call ``init_weights`` of the outermost submodules that define it and are not initialised."""
    for child in module.children():
        init_weights: Any = getattr(child, "init_weights", None)
        if callable(init_weights):
            if not getattr(child, "is_init", False):
                init_weights()
        else:
            _initialise_inside(child)
