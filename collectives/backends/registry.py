"""Back-ends by name: the default one, the user's own, one instance of each."""

import difflib
import threading
from typing import TypeAlias

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
# Reentrant: the constructor of one back-end may ask for another.
_lock = threading.RLock()


def list_all_backends() -> list[str]:
    """Return the names of all back-ends, in the order of registration.

    Whether one can be used shows when it is made: MPI may be missing, or NCCL.
    """
    with _lock:
        return list(_classes)


def set_default_dist_backend(name: str) -> None:
    """Let this back-end be used where none is named; metrics made before keep theirs.

    The default is "torch", which is one process where there is no process group.

    Raises:
        AssertionError: there is no back-end of that name.
    """
    global _default
    with _lock:
        _default = _check_name(name)


def get_dist_backend(name: BackendLike = None) -> BaseDistBackend:
    """Return a back-end: the same instance at each call for a name.

    Args:
        name: of the back-end; or a class of one, which is instantiated; or an instance, which
            comes back; None is the default.

    Raises:
        AssertionError: there is no back-end of that name.
        ImportError, RuntimeError: the library of the back-end is missing; the next call tries
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
    """Make a back-end of one's own known by a name; it is instantiated when first asked for.

    Args:
        force: replace what already has the name. Metrics made before keep theirs.

    Raises:
        TypeError: `cls` is no subclass of BaseDistBackend.
        KeyError: the name is taken.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r} of type {type(name).__name__}")
    _check_class(cls)
    with _lock:
        if name in _classes and not force:
            taken = _classes[name].__qualname__
            raise KeyError(f"{name} is the back-end {taken}; force=True replaces it")
        _classes[name] = cls
        _instances.pop(name, None)


def unregister_dist_backend(name: str) -> None:
    """Undo `register_dist_backend`: a built-in back-end is as before, another one is gone.

    The default becomes "torch" again when it was this one.

    Raises:
        AssertionError: there is no back-end of that name.
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
        near = difflib.get_close_matches(str(name), _classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AssertionError(
            f"the back-end must be one of {', '.join(_classes)}, got {name!r}{hint}"
        )
    return name


def _check_class(cls: type[BaseDistBackend]) -> type[BaseDistBackend]:
    if not (isinstance(cls, type) and issubclass(cls, BaseDistBackend)):
        raise TypeError(f"a back-end must be a subclass of BaseDistBackend, got {cls!r}")
    return cls
