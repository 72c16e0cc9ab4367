"""Functions and classes of the script itself: found again by name where the script is loaded too.

A worker that multiprocessing has spawned holds the script too, as `__main__` and by a second name,
which its objects bear and which the parent also knows. To the worker's own code what it has there
is the same as what the parent has; a copy by value would not be.
"""

from __future__ import annotations

import ast
import os
import pickle
import sys
import weakref
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

NAME = "__main__"
# A process that multiprocessing has spawned has the script under the second name.
_NAMES = (NAME, "__mp_main__")

# By value, for workers that lack them; a class may be sent with each of its instances.
_values: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()


def reduced(obj: FunctionType | type, *, by_value: bool) -> Any:
    """Return how an object of the script is to be pickled, None where pickle does well itself.

    Args:
        by_value: functions take along the globals that they use, as they are now.
    """
    module = sys.modules.get(NAME)
    path = _path(module)
    if path is None or _attribute(module, obj.__qualname__) is not obj:
        return None
    if by_value and isinstance(obj, FunctionType):
        return None
    is_there = obj.__qualname__.split(".")[0] in _names_when_imported(path)
    return _found, (path, obj.__qualname__, None if is_there else _value(obj))


def reduce_for_any_script(obj: Any) -> Any:
    """Like `reduced`, for a receiver that may run another script: what can be sent goes by value.

    Any other object gives None. A receiver of this script takes what it has by that name.
    """
    if not isinstance(obj, FunctionType | type) or obj.__module__ not in _NAMES:
        return None
    module = sys.modules.get(obj.__module__)
    path = _path(module)
    if module is None or path is None or _attribute(module, obj.__qualname__) is not obj:
        return None
    if (
        module.__name__ != NAME
        and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    ):
        # Only the processes of this script have a module of that name.
        cloudpickle.register_pickle_by_value(module)
    try:
        return _found, (path, obj.__qualname__, _dumped(obj))
    except Exception as error:
        # It need not be sent where the script is the same.
        return _found, (path, obj.__qualname__, None, str(error))


def _value(obj: FunctionType | type) -> bytes | None:
    if isinstance(obj, FunctionType):
        return _dumped(obj)
    if obj not in _values:
        _values[obj] = _dumped(obj)
    return _values[obj]


def _dumped(obj: FunctionType | type) -> bytes:
    data: bytes = cloudpickle.dumps(obj)
    return data


@cache
def _names_when_imported(path: str) -> frozenset[str]:
    """Return what the script surely defines in a worker, where it is not the main program.

    Not what stands under a condition, such as `if __name__ == "__main__"`.
    """
    spec = getattr(sys.modules[NAME], "__spec__", None)
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
    for module in map(sys.modules.get, _NAMES):
        own = _attribute(module, name) if _path(module) == path else None
        if own is not None:
            return own
    if reason:
        raise TypeError(f"{name} of {path} cannot be sent to another script: {reason}")
    if value is None:
        raise AttributeError(f"{name} of {path} is not in this process, which runs another script")
    return pickle.loads(value)


def _path(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return None if file is None else _real(file)


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _attribute(module: ModuleType | None, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
