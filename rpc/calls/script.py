"""Functions and classes of the script itself: found again in processes that run the same one.

By value alone a function would run on a copy of its globals, and a class would be another one.
"""

from __future__ import annotations

import os
import pickle
import sys
from types import FunctionType
from typing import Any

import cloudpickle

# A process that multiprocessing has spawned has the script under the second name.
_NAMES = ("__main__", "__mp_main__")


def reduced(obj: Any) -> Any:
    """Return how an object of the script is to be pickled, None for all other objects."""
    if not isinstance(obj, FunctionType | type) or obj.__module__ not in _NAMES:
        return None
    module = sys.modules.get(obj.__module__)
    path = _path(module)
    if path is None or _attribute(module, obj.__qualname__) is not obj:
        return None
    return _own_or_given, (path, obj.__qualname__, *_by_value(obj, module))


def _by_value(obj: Any, module: Any) -> tuple[bytes | None, str]:
    is_spawned = module.__name__ == "__mp_main__"
    if is_spawned and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
        # Only the processes of this script have a module of that name.
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(obj), ""
    except Exception as error:
        # It need not be sent where the script is the same.
        return None, str(error)


def _own_or_given(path: str, name: str, given: bytes | None, reason: str) -> Any:
    for module in map(sys.modules.get, _NAMES):
        own = _attribute(module, name) if _path(module) == path else None
        if own is not None:
            return own
    if given is None:
        raise TypeError(f"{name} of {path} cannot be sent to another script: {reason}")
    return pickle.loads(given)


def _path(module: Any) -> str | None:
    file = getattr(module, "__file__", None)
    return None if file is None else os.path.realpath(file)


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
