"""Turn the batch normalisation of a model into the synchronised one, and back."""

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
    """Batch normalisation of inputs of any dimension: what a ``SyncBatchNorm`` is alone."""

    _check_input_dim: Any = SyncBatchNorm._check_input_dim


# Kept from before `patch_sync_batchnorm` can replace the names in torch.nn.
_PAIRS: list[tuple[type[_BatchNorm], type[SynchronizedBatchNorm]]] = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    (BatchNormXd, SynchronizedBatchNorm),
    (SyncBatchNorm, SynchronizedBatchNorm),
]
_FORWARDS = (_BatchNorm.forward, SyncBatchNorm.forward, SynchronizedBatchNorm.forward)
# The class that a layer had before it was first converted.
_ORIGIN = "_converted_from"


def convert_sync_batchnorm(
    module: _M,
    implementation: Implementation = "stepwrap",
    *,
    process_group: distributed.ProcessGroup | None = None,
    precision: Precision | None = None,
) -> _M:
    """Make all BatchNorm layers of a model synchronised, in place; returns the model.

    The layers change their class and stay the same objects: parameters, buffers, hooks, flags and
    optimizers made before are untouched. Layers of the other implementation are converted too and
    keep their group. A ``DataParallel`` begins to run replication callbacks, which ours need.
    Layers that override ``forward``, or are parametrized, stay and are named in a warning.

    Args:
        implementation: "stepwrap": ``SynchronizedBatchNorm1d`` and so on, on any device. "torch":
            ``torch.nn.SyncBatchNorm``, which trains on GPUs only.
        process_group: the ranks to synchronise over; default: all, or the group that a layer has.
        precision: see ``SynchronizedBatchNorm2d``; default: "fp32", or that which a layer has.

    Raises:
        ValueError: another implementation or precision, or a precision for torch's layers; or the
            model is, contains or is inside a DistributedDataParallel: convert first, wrap then.
        TypeError: a lazy layer that has seen no input.
    """
    _check(implementation, precision)
    changes: list[tuple[Any, type[_BatchNorm]]] = []
    for path, one in module.named_modules():
        if isinstance(one, _BatchNorm) and (kind := _synchronised(path, one, implementation)):
            changes.append((one, kind))
    if any(type(layer) is not kind for layer, kind in changes):
        _refuse_wrapped(module)
    for layer, kind in changes:
        if type(layer) is not kind:
            made = isinstance(layer, SynchronizedBatchNorm)
            layer.__dict__.setdefault(_ORIGIN, _plain(layer) if made else type(layer))
            _change(layer, kind)
        for name, value in (("process_group", process_group), ("precision", precision)):
            if value is not None:
                setattr(layer, name, value)
    for one in module.modules():
        if isinstance(one, DataParallel) and implementation == "stepwrap":
            patch_replication_callback(one)
    return module


def revert_sync_batchnorm(module: _M) -> _M:
    """Give every synchronised layer, ours or torch's, its class of before, in place.

    Layers that were made as synchronised ones become plain: ``BatchNorm1d`` and so on, or
    ``BatchNormXd`` for inputs of any dimension in the place of torch's ``SyncBatchNorm``. Those
    that override ``forward``, or are parametrized, stay. Returns the model.
    """
    for path, layer in module.named_modules():
        if not isinstance(layer, SynchronizedBatchNorm | SyncBatchNorm):
            continue
        if not _is_own(path, layer, "synchronised"):
            _change(layer, layer.__dict__.pop(_ORIGIN, None) or _plain(layer))
    return module


convert_model = convert_sync_batchnorm


def apply_sync_batchnorm(
    module: _M,
    setting: bool | Mapping[str, Any],
    process_group: distributed.ProcessGroup | None = None,
) -> _M:
    """Do what a wrapper's option ``sync_batchnorm`` says; returns the model."""
    if not setting:
        return module
    options = {} if setting is True else setting
    check_options("sync_batchnorm", options, ["precision"])
    return convert_sync_batchnorm(module, process_group=process_group, **options)


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Let ``nn.BatchNorm1d``, ``2d`` and ``3d`` be the synchronised classes inside a ``with``.

    For models whose code makes the layers by these names; afterwards, also after an error, the
    names are what they were.
    """
    names = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    before = {name: getattr(nn, name) for name in names}
    try:
        for name in names:
            setattr(nn, name, globals()[f"Synchronized{name}"])
        yield
    finally:
        for name, kind in before.items():
            setattr(nn, name, kind)


def _check(implementation: str, precision: str | None) -> None:
    if implementation not in get_args(Implementation):
        raise ValueError(
            f'sync_bn should be "torch" or "stepwrap", but got {implementation!r} for '
            "implementation; a process_group is given by its name"
        )
    if precision is not None and implementation == "torch":
        raise ValueError("precision is for implementation='stepwrap', torch's layers have none")
    if precision is not None:
        check_precision(precision)


def _synchronised(
    path: str, layer: _BatchNorm, implementation: Implementation
) -> type[_BatchNorm] | None:
    """The class that a layer is to have; None: it cannot be converted."""
    if isinstance(layer, SyncBatchNorm if implementation == "torch" else SynchronizedBatchNorm):
        return type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(
            f"{path or 'the model itself'} ({type(layer).__name__}) has seen no input yet: run the "
            "model once, then convert it"
        )
    kinds = [kind for plain, kind in _PAIRS if isinstance(layer, (plain, kind))]
    if _is_own(path, layer, "unsynchronised", is_known=bool(kinds)):
        return None
    return SyncBatchNorm if implementation == "torch" else kinds[0]


def _is_own(path: str, layer: _BatchNorm, stays: str, *, is_known: bool = True) -> bool:
    """Whether the class of ``layer`` cannot be changed without losing what it does; logs it."""
    own_forward = type(layer).forward not in _FORWARDS or "forward" in layer.__dict__
    if is_known and not own_forward and not is_parametrized(layer):
        return False
    name = f"{path or 'the model itself'} ({type(layer).__name__})"
    logger.warning("%s has a forward or parameters of its own and stays %s", name, stays)
    return True


def _plain(layer: _BatchNorm) -> type[_BatchNorm]:
    """The class without synchronisation for a layer that was made as a synchronised one."""
    return next((plain for plain, kind in _PAIRS if isinstance(layer, kind)), BatchNormXd)


def _change(layer: _BatchNorm, kind: type[_BatchNorm]) -> None:
    """Give ``layer`` another class; its group stays where that has one."""
    state = layer.__dict__
    for name in ("eps_mode", "precision", "_place", "_agreed"):
        state.pop(name, None)
    group = state.pop("process_group", None)
    layer.__class__ = kind
    if issubclass(kind, SynchronizedBatchNorm | SyncBatchNorm):
        layer.process_group = group


def _refuse_wrapped(module: nn.Module) -> None:
    """Raise ValueError when it is too late to convert ``module``."""
    for path, one in module.named_modules():
        if isinstance(one, DistributedDataParallel):
            where = f"{path!r} of the model" if path else "the model"
            raise ValueError(
                f"{where} is wrapped in {type(one).__name__} already: convert the bare model "
                "first and wrap it then, or wrap it with sync_batchnorm=True"
            )
    wrapper = _wrapper_of(module) if distributed_available() else None
    if wrapper is not None:
        raise ValueError(
            f"{type(module).__name__} is inside {type(wrapper).__name__} already: convert the "
            "model first and wrap it then, or wrap it with sync_batchnorm=True"
        )


def _wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The live wrapper that ``module`` is inside of; looks through all objects (0.1 s)."""
    # A wrapper that nobody uses any more may still be there: it is part of cycles.
    gc.collect()
    for one in gc.get_objects():
        # Not isinstance: that runs the code of proxies.
        if not issubclass(type(one), DistributedDataParallel):
            continue
        wrapped = one.__dict__.get("_modules", {}).get("module")
        if wrapped is not None and any(part is module for part in wrapped.modules()):
            return one  # type: ignore[no-any-return]
    return None
