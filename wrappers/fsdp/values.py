"""Single values of the options of fully sharded training."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from ...registry import did_you_mean
from ..torch_functions import check_options

_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_OLD_PRECISION = ("buffer_dtype", "keep_low_precision_grads", "cast_root_forward_inputs")


def flag(name: str, value: Any) -> bool:
    """The value where it is a bool, else TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value


def member(name: str, value: Any, enum: Any, allowed: Iterable[str]) -> str:
    """The name of an enum's member, given by name or as the member itself."""
    allowed = list(allowed)
    if isinstance(value, enum):
        value = value.name
    if not isinstance(value, str):
        raise TypeError(
            f"{name} must be one of {', '.join(allowed)}, or a {enum.__name__}, got {value!r}"
        )
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")
    return value


def read_function(name: str, value: Any) -> Callable[..., Any] | None:
    """A function, its import path, or a mapping of ``type`` and further arguments."""
    settings: dict[str, Any] = {}
    if isinstance(value, Mapping):
        settings = arguments_in(value)
        value = value.get("type")
    if isinstance(value, str):
        try:
            value = pkgutil.resolve_name(value)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{name} must be the import path of a function: {error}") from error
    if value is None and not settings:
        return None
    if not callable(value):
        raise TypeError(f"{name} must be a function or its import path, got {value!r}")
    return functools.partial(value, **settings) if settings else value


def arguments_in(value: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside ``type``."""
    return {name: one for name, one in value.items() if name != "type"}


def read_precision(value: Any) -> MixedPrecisionPolicy:
    """torch's policy from a mapping of dtype names, or from its older class."""
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        names = ("param_dtype", "reduce_dtype", "cast_forward_inputs", *_OLD_PRECISION)
        value = {name: getattr(value, name) for name in names}
        # Here every block casts what comes in, and the root is one of them.
        value["cast_forward_inputs"] |= value["cast_root_forward_inputs"]
        value["cast_root_forward_inputs"] = True
    if not isinstance(value, Mapping):
        raise TypeError(
            "mixed_precision must be a mapping of dtype names or torch's policy, got "
            f"{type(value).__name__}"
        )
    check_options("mixed_precision", value, [*_PRECISION, *_OLD_PRECISION])
    _refuse_old_precision(value)
    kept = {name: value[name] for name in _PRECISION if name in value}
    cast = kept.pop("cast_forward_inputs", True)
    dtypes = {name: _read_dtype(name, dtype) for name, dtype in kept.items()}
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=flag("cast_forward_inputs", cast))


def _refuse_old_precision(value: Mapping[str, Any]) -> None:
    if value.get("buffer_dtype") is not None:
        raise ValueError(
            "mixed_precision.buffer_dtype has no counterpart: buffers keep their dtype; convert "
            "them in the model"
        )
    if value.get("keep_low_precision_grads"):
        raise ValueError(
            "mixed_precision.keep_low_precision_grads has no counterpart: gradients have the "
            "dtype of their parameters; convert the model itself to the low precision"
        )
    if not value.get("cast_root_forward_inputs", True):
        raise ValueError(
            "mixed_precision.cast_root_forward_inputs=False has no counterpart; "
            "cast_forward_inputs=False leaves the inputs of all blocks as they are"
        )


def _read_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"mixed_precision.{name} must be the name of a dtype, got {value!r}")
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        names = ["bfloat16", "float16", "float32", "float64"]
        hint = did_you_mean(value, names)
        raise ValueError(
            f"mixed_precision.{name} must be a dtype such as {', '.join(names)}, "
            f"got {value!r}{hint}"
        )
    return found


def read_offload(value: Any) -> OffloadPolicy:
    """torch's policy from a bool, a mapping, or its older class."""
    if isinstance(value, OffloadPolicy):
        return value
    pin: Any = None
    if isinstance(value, CPUOffload):
        value = value.offload_params
    elif isinstance(value, Mapping):
        check_options("cpu_offload", value, ["offload_params", "pin_memory"])
        pin = value.get("pin_memory")
        value = value.get("offload_params", True)
    if not flag("cpu_offload", value or False):
        return OffloadPolicy()
    # Pinning needs the driver of an accelerator; without one there is nothing to copy to.
    has_device = torch.accelerator.is_available()
    wanted = has_device if pin is None else flag("cpu_offload.pin_memory", pin)
    return CPUOffloadPolicy(pin_memory=wanted and has_device)
