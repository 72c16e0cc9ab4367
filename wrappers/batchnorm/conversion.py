"""Convert the BatchNorm layers of a model to synchronised layers, and back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

from torch import distributed, nn
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from ...collectives import distributed_available
from ..replicas.data_parallel import patch_replication_callback
from ..torch_functions import check_options
from .statistics import Precision
from .sync_batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    check_precision,
)

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=nn.Module)
Implementation = Literal["stepwrap", "torch"]


class BatchNormXd(_BatchNorm):
    """Batch normalisation of inputs of any dimension, without synchronisation."""

    _check_input_dim: Any = SyncBatchNorm._check_input_dim


# Read at import, before `patch_sync_batchnorm` can replace the names in torch.nn.
_PAIRS: list[tuple[type[_BatchNorm], type[SynchronizedBatchNorm]]] = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    (BatchNormXd, SynchronizedBatchNorm),
    (SyncBatchNorm, SynchronizedBatchNorm),
]
_FORWARDS = (_BatchNorm.forward, SyncBatchNorm.forward, SynchronizedBatchNorm.forward)
# The attribute with the class that a layer had before it was first converted.
_ORIGIN = "_converted_from"
_WRAP_LATER = "convert the model before you wrap it, or wrap it with sync_batchnorm=True"


def convert_sync_batchnorm(
    module: _M,
    implementation: Implementation = "stepwrap",
    *,
    process_group: distributed.ProcessGroup | None = None,
    precision: Precision | None = None,
) -> _M:
    """Convert all BatchNorm layers of a model to synchronised layers, in place; return the model.

    The layers change their class and remain the same objects: parameters, buffers, hooks, flags
    and existing optimizers remain valid. Synchronised layers of the other implementation are
    converted too and keep their group. With "stepwrap", each ``DataParallel`` in the model is
    patched to run the replication callbacks that the layers need. Layers that override ``forward``,
    are parametrized or extend torch's ``_BatchNorm`` directly are not converted, and a warning
    names them.

    Args:
        implementation: "stepwrap" for ``SynchronizedBatchNorm1d``, ``2d`` and ``3d``, which run on
            any device; "torch" for ``torch.nn.SyncBatchNorm``, which trains on GPUs only.
        process_group: the ranks to synchronise over; default: all ranks, but layers that are
            synchronised already keep their group.
        precision: see ``SynchronizedBatchNorm2d``; default: "fp32", but layers that are
            synchronised already keep their precision.

    Raises:
        ValueError: ``implementation`` or ``precision`` is unknown, ``precision`` is given for
            torch's layers, or the model is, contains or is inside a DistributedDataParallel.
        TypeError: a lazy layer has not been initialised by a forward yet.
    """
    _check_arguments(implementation, precision)
    changes: list[tuple[Any, type[_BatchNorm]]] = []
    for path, child in module.named_modules():
        if isinstance(child, _BatchNorm) and (kind := _target_class(path, child, implementation)):
            changes.append((child, kind))
    if any(type(layer) is not kind for layer, kind in changes):
        _refuse_wrapped(module)
    for layer, kind in changes:
        if type(layer) is not kind:
            is_ours = isinstance(layer, SynchronizedBatchNorm)
            layer.__dict__.setdefault(_ORIGIN, _plain_class(layer) if is_ours else type(layer))
            _change_class(layer, kind)
        for name, value in (("process_group", process_group), ("precision", precision)):
            if value is not None:
                setattr(layer, name, value)
    for child in module.modules():
        if isinstance(child, DataParallel) and implementation == "stepwrap":
            patch_replication_callback(child)
    return module


def revert_sync_batchnorm(module: _M) -> _M:
    """Convert all synchronised layers back to their original class, in place; return the model.

    This includes torch's layers. Layers that were created as synchronised layers become
    ``BatchNorm1d``, ``2d`` or ``3d``; torch's ``SyncBatchNorm``, which accepts inputs of any
    dimension, becomes ``BatchNormXd``. Layers that override ``forward`` or are parametrized are not
    changed, and a warning names them.
    """
    for path, layer in module.named_modules():
        if not isinstance(layer, SynchronizedBatchNorm | SyncBatchNorm):
            continue
        if _can_change_class(path, layer, "synchronised"):
            _change_class(layer, layer.__dict__.pop(_ORIGIN, None) or _plain_class(layer))
    return module


convert_model = convert_sync_batchnorm


def apply_sync_batchnorm(
    module: _M,
    setting: bool | Mapping[str, Any],
    process_group: distributed.ProcessGroup | None = None,
) -> _M:
    """Apply the option ``sync_batchnorm`` of a wrapper; return the model."""
    if not setting:
        return module
    options = {} if setting is True else setting
    check_options("sync_batchnorm", options, ["precision"])
    return convert_sync_batchnorm(module, process_group=process_group, **options)


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replace ``nn.BatchNorm1d``, ``2d`` and ``3d`` by the synchronised classes in this context.

    For models whose code creates the layers by these names. The original classes are restored at
    the end, even after an error.
    """
    before = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    untyped: Any = nn
    untyped.BatchNorm1d = SynchronizedBatchNorm1d
    untyped.BatchNorm2d = SynchronizedBatchNorm2d
    untyped.BatchNorm3d = SynchronizedBatchNorm3d
    try:
        yield
    finally:
        untyped.BatchNorm1d, untyped.BatchNorm2d, untyped.BatchNorm3d = before


def _check_arguments(implementation: str, precision: str | None) -> None:
    if implementation not in get_args(Implementation):
        # The message begins like mmengine's.
        raise ValueError(
            'sync_bn should be "torch" or "stepwrap", but got '
            f"{implementation!r} as implementation; pass a process group as process_group=..."
        )
    if precision is not None:
        if implementation == "torch":
            raise ValueError(
                "precision must be None for implementation='torch', whose layers do not have it"
            )
        check_precision(precision)


def _target_class(
    path: str, layer: _BatchNorm, implementation: Implementation
) -> type[_BatchNorm] | None:
    """Return the synchronised class of a layer, or None if it cannot be converted."""
    if isinstance(layer, SyncBatchNorm if implementation == "torch" else SynchronizedBatchNorm):
        return type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(
            f"{path or 'the model itself'} ({type(layer).__name__}) is not initialised yet: run "
            "the model once, then convert it"
        )
    kinds = [kind for plain, kind in _PAIRS if isinstance(layer, (plain, kind))]
    if not _can_change_class(path, layer, "unsynchronised", is_known=bool(kinds)):
        return None
    return SyncBatchNorm if implementation == "torch" else kinds[0]


def _can_change_class(path: str, layer: _BatchNorm, current: str, *, is_known: bool = True) -> bool:
    """Return whether ``layer`` would work as before with another class; warn if it would not."""
    overrides = type(layer).forward not in _FORWARDS or "forward" in layer.__dict__
    if is_known and not overrides and not is_parametrized(layer):
        return True
    name = f"{path or 'the model itself'} ({type(layer).__name__})"
    logger.warning("%s has a custom class, forward or parametrization and stays %s", name, current)
    return False


def _plain_class(layer: _BatchNorm) -> type[_BatchNorm]:
    """Return the unsynchronised class for a layer that was created synchronised."""
    return next((plain for plain, kind in _PAIRS if isinstance(layer, kind)), BatchNormXd)


def _change_class(layer: _BatchNorm, kind: type[_BatchNorm]) -> None:
    """Change the class of ``layer``; keep its group if the new class has one."""
    state = layer.__dict__
    for name in ("eps_mode", "precision", "_place", "_call_counter"):
        state.pop(name, None)
    group = state.pop("process_group", None)
    layer.__class__ = kind
    if issubclass(kind, SynchronizedBatchNorm | SyncBatchNorm):
        layer.process_group = group


def _refuse_wrapped(module: nn.Module) -> None:
    """Raise ValueError if ``module`` contains or is inside a ``DistributedDataParallel``."""
    for path, child in module.named_modules():
        if isinstance(child, DistributedDataParallel):
            where = f"{path!r} of the model" if path else "the model"
            raise ValueError(f"{where} is already wrapped in {type(child).__name__}: {_WRAP_LATER}")
    wrapper = _find_wrapper(module) if distributed_available() else None
    if wrapper is not None:
        kinds = f"{type(module).__name__} is already inside {type(wrapper).__name__}"
        raise ValueError(f"{kinds}: {_WRAP_LATER}")


def _find_wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """Search all objects of the process for a wrapper around ``module``; takes about 0.1 s."""
    # Discarded wrappers remain until their reference cycles are collected.
    gc.collect()
    for candidate in gc.get_objects():
        # isinstance could run code of proxy objects.
        if not issubclass(type(candidate), DistributedDataParallel):
            continue
        wrapped = candidate.__dict__.get("_modules", {}).get("module")
        if wrapped is not None and any(child is module for child in wrapped.modules()):
            return candidate  # type: ignore[no-any-return]
    return None
