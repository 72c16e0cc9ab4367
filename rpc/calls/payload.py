"""Objects as bytes plus the parts that torch moves by itself: tensors.

Functions and classes that the receiver could not import (lambdas, local ones, those of a script)
travel by value, which is cloudpickle's work. Only members of the own world send such bytes.
"""

import io
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ...parallel import reduce_for_any_script

Parcel = tuple[bytes, list[Any]]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_MOVABLE = frozenset({torch.strided, torch.sparse_coo})


def pack(value: Any) -> Parcel:
    """Return `value` as a parcel.

    Raises:
        TypeError: something in it cannot be pickled; the text says what.
    """
    if type(value) in _PLAIN:
        return pickle.dumps(value, protocol=5), []
    file, parts = io.BytesIO(), _Parts()
    outer = getattr(_open, "undo", None)
    _open.undo = parts.undo
    try:
        _Pickler(file, parts).dump(value)
    except Exception as error:
        take_back((b"", parts))
        raise TypeError(f"cannot be sent to another process: {error}") from error
    finally:
        _open.undo = outer
    return file.getvalue(), parts if parts.undo else list(parts)


def if_not_sent(undo: Callable[[], None]) -> None:
    """While an object is packed: note what is to be done if its parcel never arrives."""
    noted = getattr(_open, "undo", None)
    if noted is not None:
        noted.append(undo)


def take_back(parcel: Parcel) -> None:
    """Do what was noted for a parcel that has not arrived."""
    for undo in getattr(parcel[1], "undo", ()):
        undo()


def unpack(parcel: Parcel) -> Any:
    """Return the object of a parcel."""
    payload, parts = parcel
    if not parts:
        return pickle.loads(payload)
    # Loading may unpack another parcel, inside an object's __setstate__.
    kept = getattr(_open, "parts", None)
    _open.parts = parts
    try:
        return pickle.loads(payload)
    finally:
        _open.parts = kept


# The parcels that this thread is packing and unpacking.
_open = threading.local()


def _part(index: int) -> Any:
    return _open.parts[index]


class _Parts(list[Any]):
    """Parts with what is to be done if they never arrive; elsewhere they are a list."""

    def __init__(self, parts: Iterable[Any] = ()) -> None:
        super().__init__(parts)
        self.undo: list[Callable[[], None]] = []

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _is_moved_by_torch(obj: Any) -> bool:
    if type(obj) is not Tensor or obj.is_nested or obj.is_meta:
        return False
    return obj.layout in _MOVABLE


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts tensors aside and leaves a number in their place."""

    def __init__(self, file: io.BytesIO, parts: _Parts) -> None:
        super().__init__(file, protocol=5)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if _is_moved_by_torch(obj):
            self._parts.append(obj)
            return _part, (len(self._parts) - 1,)
        if type(obj) is _Parts:
            # A parcel in a parcel.
            self._parts.undo += obj.undo
        found = reduce_for_any_script(obj)
        return super().reducer_override(obj) if found is None else found
