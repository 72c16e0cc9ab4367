"""Objects as bytes: functions and classes of any origin, tensors by copy or by reference.

Plain data is pickled in C; torch is imported only when an object contains tensors. Unpickling runs
code, so ``loads`` must only get bytes from the user's own processes.
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
from functools import cache
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import IO, Any

import cloudpickle

from .buffers import OUT_OF_BAND_BYTES, divider

_static_modules: set[str] = set()


def dumps(obj: object, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Return the object as bytes for ``loads``; see ``Pickler`` for the arguments."""
    return Pickler(io.BytesIO(), recurse, copy_tensor).message(obj)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Return the object from the bytes of ``dumps`` or of a file that ``Pickler`` wrote.

    Raises:
        OSError: a tensor that was passed by reference has left shared memory.
    """
    return pickle.loads(data)


def mark_static_module(module: ModuleType) -> None:
    """Pickle a module by name from now on, and also the functions and classes found in it.

    The receiver must be able to import the module, or have put it into ``sys.modules``.

    Raises:
        TypeError: ``module`` is not a module.
    """
    if not isinstance(module, ModuleType):
        raise TypeError(f"mark_static_module() takes a module, got {type(module).__name__}")
    _static_modules.add(module.__name__)


class _Reducers(dict[type, Any]):
    """cloudpickle's reducers, then multiprocessing's (connections, sockets) and copyreg's.

    The last two are looked up each time, because other code may add to them. A ``ChainMap`` would
    do the same, but more slowly.
    """

    def __missing__(self, kind: type) -> Any:
        further: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        return further[kind] if kind in further else copyreg.dispatch_table[kind]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes objects to a file, each ``dump`` as a separate message.

    Functions and classes that other processes cannot import (lambdas, local ones) are sent by
    value, with only the globals that they use. Functions and classes at the top level of the script
    are sent by name, for receivers that have loaded the script, as multiprocessing's spawned
    workers do. Other functions and classes of the script are sent by value, but a receiver that
    runs the script and has the name uses its own object.

    Args:
        file: has ``write(bytes)``.
        recurse: send the script's functions by value too, with the globals that they use, so that
            the receiver gets globals that are set under ``if __name__ == "__main__"``.
        copy_tensor: True writes the elements that each tensor views; the receiver gets a tensor on
            the same device. False moves CPU tensors into shared memory, where sender and receiver
            see the same numbers, and sends handles of CUDA tensors; some process must keep the
            tensors until they are loaded. In both cases, overlapping tensors still overlap.

    Raises:
        RuntimeError: from ``dump`` without ``copy_tensor``, for a tensor that is the result of a
            computation recorded by autograd.
    """

    dispatch_table = _Reducers(cloudpickle.Pickler._dispatch_table)
    # Keep buffers of arrays inside the pickle, whatever their size.
    _apart_from = sys.maxsize

    def __init__(self, file: IO[bytes], recurse: bool = False, copy_tensor: bool = False) -> None:
        self._file = file
        self._stream = io.BytesIO()
        self._recurse = recurse
        self._copy_tensor = copy_tensor
        self._parts: list[Any] = []
        # The callback is not a method, because a reference cycle would keep all tensors until
        # garbage collection.
        super().__init__(self._stream, 5, divider(self._parts, self._apart_from))

    def dump(self, obj: object) -> None:
        """Write the object. Raises whatever pickling the object raises."""
        self._file.write(self.message(obj))

    def message(self, value: object) -> bytes:
        """Return the bytes that ``dump`` writes."""
        stream, payloads = self.split(value)
        if not payloads:
            return stream
        # Imported here: it imports torch, which only objects with tensors need.
        from . import tensors as _tensors

        return _tensors.message(stream, payloads, self._copy_tensor)

    def split(self, value: object) -> tuple[bytes, list[Any]]:
        """Return a pickle of the object, and its tensors, storages and large buffers in order."""
        try:
            super().dump(value)
            return self._stream.getvalue(), self._parts.copy()
        finally:
            self._stream.seek(0)
            self._stream.truncate()
            self._parts.clear()
            # The next message must not refer to objects of this one.
            self.clear_memo()
            self.globals_ref.clear()

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle functions, classes, modules and tensors."""
        kind = type(value)
        if kind is FunctionType or issubclass(kind, type):
            return self._reduced_definition(value)
        if kind is ModuleType and value.__name__ in _static_modules:
            return importlib.import_module, (value.__name__,)
        if "torch" in sys.modules:
            from . import tensors as _tensors

            if isinstance(value, _tensors.KINDS):
                return _tensors.reduced(value, self._parts, copy_tensor=self._copy_tensor)
        return NotImplemented

    def _reduced_definition(self, definition: Any) -> Any:
        module = definition.__module__
        if module in _static_modules and _attribute(module, definition.__qualname__) is definition:
            # pickle itself writes the name.
            return NotImplemented
        reduced = _reduced_of_script(definition, recurse=self._recurse) if module == _MAIN else None
        return super().reducer_override(definition) if reduced is None else reduced


class _ApartPickler(Pickler):
    """Keeps large buffers out of the pickle."""

    _apart_from = OUT_OF_BAND_BYTES


def split(value: object, *, recurse: bool, copy_tensor: bool) -> tuple[bytes, list[Any]]:
    """Return a pickle of the object, and its tensors, storages and large buffers in order."""
    return _ApartPickler(io.BytesIO(), recurse, copy_tensor).split(value)


_MAIN = "__main__"
# In processes that multiprocessing has spawned, the script has the second name.
_MAIN_NAMES = (_MAIN, "__mp_main__")

# Caches pickles of the script's classes, because a class may be sent with each of its instances.
_pickled_classes: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()


def _reduced_of_script(definition: FunctionType | type, *, recurse: bool) -> Any:
    """Return how to pickle an object of the script, None to leave it to cloudpickle."""
    path = _find_script(definition)
    if path is None or (recurse and isinstance(definition, FunctionType)):
        return None
    is_importable = definition.__qualname__.split(".")[0] in _names_when_imported(path)
    return _load_from_script, (
        path,
        definition.__qualname__,
        None if is_importable else _pickled(definition),
    )


def reduce_for_any_script(value: Any) -> Any:
    """Reduce an object of the script for a receiver that may run a different script.

    The object is sent by value if possible; a receiver that runs the same script uses its own
    object of that name. Return None for objects that are not the script's.
    """
    path = _find_script(value) if isinstance(value, FunctionType | type) else None
    if path is None:
        return None
    name = value.__module__
    if name != _MAIN and name not in cloudpickle.list_registry_pickle_by_value():
        # Only processes of this script have a module with that name.
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return _load_from_script, (path, value.__qualname__, cloudpickle.dumps(value))
    except Exception as error:
        # A receiver that runs the same script does not need the value.
        return _load_from_script, (path, value.__qualname__, None, str(error))


def _pickled(definition: FunctionType | type) -> bytes:
    if isinstance(definition, FunctionType):
        return bytes(cloudpickle.dumps(definition))
    if definition not in _pickled_classes:
        _pickled_classes[definition] = cloudpickle.dumps(definition)
    return _pickled_classes[definition]


@cache
def _names_when_imported(path: str) -> frozenset[str]:
    """Return the names that the script always defines when a worker imports it.

    Names defined under a condition, such as ``if __name__ == "__main__"``, are left out.
    """
    spec = getattr(sys.modules[_MAIN], "__spec__", None)
    # multiprocessing does not import a package's __main__ in its workers: that would run it.
    if os.path.basename(path) == "__main__.py" or getattr(spec, "name", "") == "__main__":
        return frozenset()
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(statement.name for statement in body if isinstance(statement, kinds))


def _load_from_script(path: str, name: str, value: bytes | None, reason: str = "") -> Any:
    for module in _MAIN_NAMES:
        definition = _attribute(module, name) if _path(module) == path else None
        if definition is not None:
            return definition
    if reason:
        raise TypeError(f"{name} of {path} cannot be sent to another script: {reason}")
    if value is None:
        raise AttributeError(f"{name} of {path} is not in this process, which runs another script")
    return pickle.loads(value)


def _find_script(definition: FunctionType | type) -> str | None:
    """Return the path of the script if it has the object under the object's name."""
    name = definition.__module__
    is_found = name in _MAIN_NAMES and _attribute(name, definition.__qualname__) is definition
    return _path(name) if is_found else None


def _path(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else _real_path(file)


# Cached: every message with a function of the script needs it.
@cache
def _real_path(file: str) -> str:
    return os.path.realpath(file)


def _attribute(module: str, name: str) -> Any:
    attribute: Any = sys.modules.get(module)
    for component in name.split("."):
        attribute = getattr(attribute, component, None)
    return attribute
