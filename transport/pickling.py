"""Objects as bytes: functions and classes of any origin, tensors by copy or by reference.

Objects of plain data take the C pickler's path; torch is needed only where a tensor is at hand.
Loading runs what the bytes say: only for bytes from one's own processes.
"""

from __future__ import annotations

import ast
import copyreg
import importlib
import io
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from functools import cache
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import IO, Any

import cloudpickle

from .buffers import APART_FROM, divider

_LARGE = 64 * 1024

_static_modules: set[str] = set()


def dumps(obj: object, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Return the object as bytes, for `loads`; see `Pickler` for the arguments."""
    pickler = _take(Pickler, recurse, copy_tensor)
    data = pickler.message(obj)
    _give_back(pickler, len(data))
    return data


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Return the object of bytes from `dumps` or of a file written by `Pickler`.

    Raises:
        OSError: a tensor passed by reference has left shared memory.
    """
    return pickle.loads(data)


def mark_static_module(module: ModuleType) -> None:
    """From now on pickle the module as its name, whatever it holds and wherever it came from.

    So are the functions and classes that are found in it. The receiver must be able to import it,
    or have put it into `sys.modules`.

    Raises:
        TypeError: `module` is not a module.
    """
    if not isinstance(module, ModuleType):
        raise TypeError(f"mark_static_module() takes a module, got {type(module).__name__}")
    _static_modules.add(module.__name__)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How to pickle single types; those that copyreg has got to know later are found too."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes objects to a file, each `dump` as a separate message.

    Functions and classes that cannot be imported elsewhere (lambdas, local ones) go by value with
    exactly the globals that they refer to. Those of the script are found by name in a process that
    has loaded the script, as multiprocessing's spawned workers do, else they go by value.

    Args:
        file: has `write(bytes)`.
        recurse: send the script's functions by value too, so that globals travel that the
            receiver does not have (those set under `if __name__ == "__main__"`).
        copy_tensor: True writes the tensors' bytes, as far as they are viewed; the receiver owns a
            tensor on the same device. False moves CPU tensors into shared memory, where sender and
            receiver see the same numbers, and passes CUDA tensors as handles; a process must keep
            the tensors until they are loaded. Either way those that overlap still do afterwards.

    Raises:
        RuntimeError: from `dump` without `copy_tensor`: a tensor is the result of a computation
            that autograd records.
    """

    # With what multiprocessing can send besides: connections, sockets.
    dispatch_table = _Reducers(
        {**ForkingPickler._extra_reducers, **cloudpickle.Pickler._dispatch_table}  # type: ignore[attr-defined]
    )
    # Buffers of arrays from this size on stand outside of the pickle.
    _apart_from = sys.maxsize

    def __init__(self, file: IO[bytes], recurse: bool = False, copy_tensor: bool = False) -> None:
        self._file = file
        self._stream = io.BytesIO()
        self._recurse = recurse
        self._copy_tensor = copy_tensor
        self._parts: list[Any] = []
        # Not a method of this object: that cycle would keep all tensors until it is collected.
        super().__init__(self._stream, 5, divider(self._parts, self._apart_from))

    def dump(self, obj: object) -> None:
        """Write the object; raises whatever pickling it raises."""
        self._file.write(self.message(obj))

    def message(self, obj: object) -> bytes:
        """Return what `dump` writes."""
        stream, parts = self.split(obj)
        if not parts:
            return stream
        # Imports torch, which only an object with tensors needs.
        from . import tensors as _tensors

        return _tensors.message(stream, parts, self._copy_tensor)

    def split(self, obj: object) -> tuple[bytes, list[Any]]:
        """Return a pickle of the object, and its tensors, storages and large buffers in order."""
        try:
            super().dump(obj)
            return self._stream.getvalue(), self._parts.copy()
        finally:
            self._stream.seek(0)
            self._stream.truncate()
            self._parts.clear()
            # The next message may not refer to what this one holds.
            self.clear_memo()
            self.globals_ref.clear()

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle functions, classes, modules and tensors."""
        kind = type(obj)
        if kind is FunctionType or issubclass(kind, type):
            return self._reduced_definition(obj)
        if kind is ModuleType and obj.__name__ in _static_modules:
            return importlib.import_module, (obj.__name__,)
        if "torch" in sys.modules:
            from . import tensors as _tensors

            if isinstance(obj, _tensors.KINDS):
                return _tensors.reduced(obj, self._parts, copy_tensor=self._copy_tensor)
        return NotImplemented

    def _reduced_definition(self, obj: Any) -> Any:
        module = obj.__module__
        found = None
        if module in _static_modules and _attribute(module, obj.__qualname__) is obj:
            # By name, which is what pickle itself does.
            found = NotImplemented
        elif module == _MAIN:
            found = _reduced_of_script(obj, by_value=self._recurse)
        return super().reducer_override(obj) if found is None else found


class _ApartPickler(Pickler):
    """Keeps large buffers out of the pickle."""

    _apart_from = APART_FROM


def split(obj: object, *, recurse: bool, copy_tensor: bool) -> tuple[bytes, list[Any]]:
    """Return a pickle of the object, and its tensors, storages and large buffers in order."""
    pickler = _take(_ApartPickler, recurse, copy_tensor)
    parted = pickler.split(obj)
    _give_back(pickler, len(parted[0]))
    return parted


# Making one takes longer than pickling a small object.
_idle: dict[tuple[type[Pickler], bool, bool], list[Pickler]] = {}


def _take(kind: type[Pickler], recurse: bool, copy_tensor: bool) -> Pickler:
    """Return a pickler that no other thread, and no caller further up, is using."""
    try:
        return _idle[kind, recurse, copy_tensor].pop()
    except (KeyError, IndexError):
        return kind(io.BytesIO(), recurse, copy_tensor)


def _give_back(pickler: Pickler, size: int) -> None:
    # One that has seen many objects keeps a large memo, which takes time to clear.
    if size < _LARGE:
        _idle.setdefault((type(pickler), pickler._recurse, pickler._copy_tensor), []).append(
            pickler
        )


_MAIN = "__main__"
# A process that multiprocessing has spawned has the script under the second name.
_NAMES = (_MAIN, "__mp_main__")

# By value, for workers that lack them; a class may be sent with each of its instances.
_values: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()


def _reduced_of_script(obj: FunctionType | type, *, by_value: bool) -> Any:
    """Return how an object of the script is to be pickled, None where pickle does well itself.

    Args:
        by_value: functions take along the globals that they use, as they are now.
    """
    path = _script_of(obj)
    if path is None or (by_value and isinstance(obj, FunctionType)):
        return None
    is_there = obj.__qualname__.split(".")[0] in _names_when_imported(path)
    return _found, (path, obj.__qualname__, None if is_there else _value(obj))


def reduce_for_any_script(obj: Any) -> Any:
    """Reduce an object of the script for a receiver that may run another one: by value if possible.

    None for any other object. A receiver that runs this script takes its own of that name.
    """
    path = _script_of(obj) if isinstance(obj, FunctionType | type) else None
    if path is None:
        return None
    name = obj.__module__
    if name != _MAIN and name not in cloudpickle.list_registry_pickle_by_value():
        # Only the processes of this script have a module of that name.
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return _found, (path, obj.__qualname__, cloudpickle.dumps(obj))
    except Exception as error:
        # It need not be sent where the script is the same.
        return _found, (path, obj.__qualname__, None, str(error))


def _value(obj: FunctionType | type) -> bytes:
    data: bytes | None = None if isinstance(obj, FunctionType) else _values.get(obj)
    if data is None:
        data = cloudpickle.dumps(obj)
        if isinstance(obj, type):
            _values[obj] = data
    return data


@cache
def _names_when_imported(path: str) -> frozenset[str]:
    """Return the names that the script surely defines in a worker, which imports it.

    Not what stands under a condition, such as `if __name__ == "__main__"`.
    """
    spec = getattr(sys.modules[_MAIN], "__spec__", None)
    # multiprocessing imports no package's __main__ in its workers, since that would run it.
    if os.path.basename(path) == "__main__.py" or getattr(spec, "name", "") == "__main__":
        return frozenset()
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(statement.name for statement in body if isinstance(statement, kinds))


def _found(path: str, name: str, value: bytes | None, reason: str = "") -> Any:
    for module in _NAMES:
        own = _attribute(module, name) if _path(module) == path else None
        if own is not None:
            return own
    if reason:
        raise TypeError(f"{name} of {path} cannot be sent to another script: {reason}")
    if value is None:
        raise AttributeError(f"{name} of {path} is not in this process, which runs another script")
    return pickle.loads(value)


def _script_of(obj: FunctionType | type) -> str | None:
    """Return the path of the script, if the object is found in it by its name."""
    name = obj.__module__
    is_found = name in _NAMES and _attribute(name, obj.__qualname__) is obj
    return _path(name) if is_found else None


def _path(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else _real(file)


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _attribute(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
