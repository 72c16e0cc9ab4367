"""Objects as bytes plus the parts that torch moves by itself: tensors and references.

Functions and classes that the receiver could not import (lambdas, local ones, those of a script)
travel by value, which is cloudpickle's work. Only members of the own world send such bytes.
"""

import io
import pickle
import threading
from typing import Any

import cloudpickle
from torch import Tensor
from torch._C._distributed_rpc import PyRRef

Parcel = tuple[bytes, list[Any]]

_MOVED_BY_TORCH = frozenset({Tensor, PyRRef})
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def pack(value: Any) -> Parcel:
    """Return `value` as a parcel.

    Raises:
        TypeError: something in it cannot be pickled; the text says what.
    """
    if type(value) in _PLAIN:
        return pickle.dumps(value, protocol=5), []
    file, parts = io.BytesIO(), list[Any]()
    try:
        _Pickler(file, parts).dump(value)
    except Exception as error:
        raise TypeError(f"cannot be sent to another process: {error}") from error
    return file.getvalue(), parts


def unpack(parcel: Parcel) -> Any:
    """Return the object of a parcel."""
    payload, parts = parcel
    if not parts:
        return pickle.loads(payload)
    # Loading may unpack another parcel, inside an object's __setstate__.
    kept = getattr(_opened, "parts", None)
    _opened.parts = parts
    try:
        return pickle.loads(payload)
    finally:
        _opened.parts = kept


_opened = threading.local()


def _part(index: int) -> Any:
    return _opened.parts[index]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts tensors and references aside and leaves a number in their place."""

    def __init__(self, file: io.BytesIO, parts: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in _MOVED_BY_TORCH:
            return super().reducer_override(obj)
        self._parts.append(obj)
        return _part, (len(self._parts) - 1,)
