"""Backends by name: built-in and custom ones, the default, and one instance of each."""

import threading
from typing import TypeAlias

from ...primitives.suggestions import did_you_mean
from .base import BaseDistBackend
from .mpi import MPI4PyDist
from .torch_backends import NonDist, TorchCPUDist, TorchCUDADist, TorchDist

BackendLike: TypeAlias = str | BaseDistBackend | type[BaseDistBackend] | None

_BUILTIN: dict[str, type[BaseDistBackend]] = {
    "non_dist": NonDist,
    "mpi4py": MPI4PyDist,
    "torch": TorchDist,
    "torch_cpu": TorchCPUDist,
    "torch_cuda": TorchCUDADist,
}
_DEFAULT = "torch"
_classes = dict(_BUILTIN)
_instances: dict[str, BaseDistBackend] = {}
_default = _DEFAULT
# Reentrant because the constructor of one backend may call get_dist_backend for another.
_lock = threading.RLock()


def list_all_backends() -> list[str]:
    """Return the names of all backends, in the order of registration.

    A listed backend may still be unusable: creating it raises if MPI or NCCL is missing.
    """
    with _lock:
        return list(_classes)


def set_default_dist_backend(name: str) -> None:
    """Set the backend that is used if none is named; existing metrics keep theirs.

    The default is "torch", which without a process group acts as a single process.

    Raises:
        AssertionError: no backend has this name.
    """
    global _default
    with _lock:
        _default = _check_name(name)


def get_dist_backend(name: BackendLike = None) -> BaseDistBackend:
    """Return a backend; each name has one instance.

    Args:
        name: the name of a backend; a subclass of BaseDistBackend, which is instantiated; an
            instance, which is returned; or None for the default.

    Raises:
        AssertionError: no backend has this name.
        ImportError, RuntimeError: the library of the backend is missing; the next call tries
            again.
    """
    if isinstance(name, BaseDistBackend):
        return name
    if isinstance(name, type):
        return _check_class(name)()
    with _lock:
        name = _default if name is None else _check_name(name)
        if name not in _instances:
            _instances[name] = _classes[name]()
        return _instances[name]


def register_dist_backend(name: str, cls: type[BaseDistBackend], force: bool = False) -> None:
    """Register a custom backend by name; it is instantiated on first use.

    Args:
        name: the name for ``get_dist_backend``.
        cls: a subclass of BaseDistBackend.
        force: replace a backend that already has the name. Existing metrics keep theirs.

    Raises:
        TypeError: ``cls`` is not a subclass of BaseDistBackend, or the name is not a string.
        KeyError: the name is taken.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r} of type {type(name).__name__}")
    _check_class(cls)
    with _lock:
        if name in _classes and not force:
            class_name = _classes[name].__qualname__
            raise KeyError(f"{name} is the backend {class_name}; force=True replaces it")
        _classes[name] = cls
        _instances.pop(name, None)


def unregister_dist_backend(name: str) -> None:
    """Undo ``register_dist_backend``: restore a built-in backend or remove a custom one.

    If the removed backend was the default, "torch" becomes the default again.

    Raises:
        AssertionError: no backend has this name.
    """
    global _default
    with _lock:
        _instances.pop(_check_name(name), None)
        if name in _BUILTIN:
            _classes[name] = _BUILTIN[name]
            return
        del _classes[name]
        if _default == name:
            _default = _DEFAULT


def _check_name(name: str) -> str:
    if name not in _classes:
        hint = did_you_mean(str(name), _classes, limit=1)
        raise AssertionError(
            f"the backend must be one of {', '.join(_classes)}, got {name!r}{hint}"
        )
    return name


def _check_class(cls: type[BaseDistBackend]) -> type[BaseDistBackend]:
    if not (isinstance(cls, type) and issubclass(cls, BaseDistBackend)):
        raise TypeError(f"a backend must be a subclass of BaseDistBackend, got {cls!r}")
    return cls
