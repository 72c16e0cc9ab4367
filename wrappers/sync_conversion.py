"""Turn the batch normalisation of a model into the synchronised one, and back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import distributed, nn
from torch.nn.modules.batchnorm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    SyncBatchNorm,
    _BatchNorm,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from .patched_parallel import patch_replication_callback
from .sync_batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
)

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=nn.Module)
# Kept from before `patch_sync_batchnorm` can replace the names in torch.nn.
_PAIRS: list[tuple[type[_BatchNorm], type[SynchronizedBatchNorm]]] = [
    (BatchNorm1d, SynchronizedBatchNorm1d),
    (BatchNorm2d, SynchronizedBatchNorm2d),
    (BatchNorm3d, SynchronizedBatchNorm3d),
    (SyncBatchNorm, SynchronizedBatchNorm),
]
_FORWARDS = (_BatchNorm.forward, SyncBatchNorm.forward)
# The class that a converted layer had; only there while it differs from the default.
_ORIGIN = "_converted_from"


def convert_sync_batchnorm(module: _M, process_group: distributed.ProcessGroup | None = None) -> _M:
    """Make all BatchNorm layers of a model synchronised, in place; returns the model.

    The layers change their class and stay the same objects: parameters, buffers, hooks, flags and
    what else refers to them are untouched, and so are optimizers made before. torch's
    ``SyncBatchNorm`` is converted too and keeps its group. A ``DataParallel`` begins to run
    replication callbacks. Layers that override ``forward``, or are parametrized, cannot be
    converted and are named in a warning of the log.

    Args:
        process_group: the ranks to synchronise over; default: all, or the group that a layer has.

    Raises:
        ValueError: the model is, contains or is inside a DistributedDataParallel: convert first,
            wrap then.
        TypeError: a lazy layer that has seen no input.
    """
    layers = [(path, one) for path, one in module.named_modules() if isinstance(one, _BatchNorm)]
    chosen = {path: (layer, _synchronised(path, layer)) for path, layer in layers}
    if any(kind is not None for _, kind in chosen.values()):
        _refuse_wrapped(module)
    for layer, kind in chosen.values():
        if kind is not None:
            _convert(layer, kind)
        if process_group is not None and isinstance(layer, SynchronizedBatchNorm):
            layer.process_group = process_group
    for one in module.modules():
        if isinstance(one, DataParallel):
            patch_replication_callback(one)
    return module


def revert_sync_batchnorm(module: _M) -> _M:
    """Give every synchronised layer the class it had before, in place; returns the model.

    Layers that were made as synchronised ones become those of torch.
    """
    for layer in module.modules():
        if not isinstance(layer, SynchronizedBatchNorm):
            continue
        default = next(plain for plain, kind in _PAIRS if isinstance(layer, kind))
        state = layer.__dict__
        layer.__class__ = state.pop(_ORIGIN, default)
        for name in ("eps_mode", "_place", "_agreed"):
            state.pop(name, None)
        group = state.pop("process_group", None)
        if isinstance(layer, SyncBatchNorm):
            layer.process_group = group
    return module


convert_model = convert_sync_batchnorm


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


def _synchronised(path: str, layer: _BatchNorm) -> type[SynchronizedBatchNorm] | None:
    """The class that a layer is to have; None: it stays as it is."""
    if isinstance(layer, SynchronizedBatchNorm):
        return None
    name = f"{path or 'the model itself'} ({type(layer).__name__})"
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(f"{name} has seen no input yet: run the model once, then convert it")
    kinds = [kind for plain, kind in _PAIRS if isinstance(layer, plain)]
    own_forward = type(layer).forward not in _FORWARDS or "forward" in layer.__dict__
    if not kinds or own_forward or is_parametrized(layer):
        logger.warning("%s has a forward or parameters of its own and stays unsynchronised", name)
        return None
    return kinds[0]


def _convert(layer: _BatchNorm, kind: type[SynchronizedBatchNorm]) -> None:
    if all(type(layer) is not plain for plain, of_plain in _PAIRS if of_plain is kind):
        layer.__dict__[_ORIGIN] = type(layer)
    layer.__class__ = kind


def _refuse_wrapped(module: nn.Module) -> None:
    """Raise ValueError when it is too late to convert ``module``."""
    for path, one in module.named_modules():
        if isinstance(one, DistributedDataParallel):
            where = f"{path!r} of the model" if path else "the model"
            raise ValueError(
                f"{where} is wrapped in {type(one).__name__} already: convert the bare model "
                "first and wrap it then, or wrap it with sync_batchnorm=True"
            )
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if _wrapper_of(module) is None:
        return
    # A wrapper that nobody uses any more may still be there: it is part of cycles.
    gc.collect()
    wrapper = _wrapper_of(module)
    if wrapper is not None:
        raise ValueError(
            f"{type(module).__name__} is inside {type(wrapper).__name__} already: convert the "
            "model first and wrap it then, or wrap it with sync_batchnorm=True"
        )


def _wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """The live wrapper that ``module`` is inside of.

    Modules do not know what they are in, so all objects are looked through (0.1 s).
    """
    for one in gc.get_objects():
        # Not isinstance: that runs the code of proxies.
        if not issubclass(type(one), DistributedDataParallel):
            continue
        wrapped = one.__dict__.get("_modules", {}).get("module")
        if wrapped is not None and any(part is module for part in wrapped.modules()):
            return one  # type: ignore[no-any-return]
    return None
