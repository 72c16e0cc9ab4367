"""Callbacks for a ``DataParallel`` that is there already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from .data_parallel import ReplicationCallbackDataParallel


def patch_replication_callback(data_parallel: DataParallel[Any]) -> None:
    """Have a ``DataParallel`` made elsewhere run the callbacks, as if it were one of ours.

    Works in place, once however often it is called, and stays through ``deepcopy`` and pickle.
    Its type becomes ``ReplicationCallbackDataParallel``, or a subclass of that and of its own
    type, whose overridden methods are used.

    Raises:
        AssertionError: not a ``DataParallel``.
    """
    if not isinstance(data_parallel, DataParallel):
        # As documented by the systems this is for.
        raise AssertionError(f"expected a DataParallel, got {type(data_parallel).__name__}")
    data_parallel.__class__ = _patched(type(data_parallel))  # type: ignore[arg-type]


class _Patched:
    """What a patched object has in front of the methods of its own class."""

    _patched_from: type[DataParallel[Any]]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy by the own class, which may do it without ours; call back in either case."""
        copies: list[nn.Module] = super().replicate(module, device_ids)  # type: ignore[misc]
        called: list[nn.Module] = self._called_back(copies)  # type: ignore[attr-defined]
        return called

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name to be found under: it is made again from the original one.
        make, arguments, *rest = tuple(super().__reduce_ex__(protocol))
        original = (self._patched_from if one is type(self) else one for one in arguments)
        return _make_patched, (make, tuple(original)), *rest


@functools.cache
def _patched(kind: type[DataParallel[Any]]) -> type[DataParallel[Any]]:
    if issubclass(kind, ReplicationCallbackDataParallel):
        return kind
    if kind is DataParallel:
        return ReplicationCallbackDataParallel
    # Ours comes last, where the original class looks for torch's.
    names = {"_patched_from": kind, "__module__": kind.__module__}
    return type(kind.__name__, (_Patched, kind, ReplicationCallbackDataParallel), names)


def _make_patched(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = make(*arguments)
    patch_replication_callback(made)
    return made
