"""Parts of an object that stand outside of its pickle, in the order of their marks in it.

Imports no torch: many processes handle no tensor.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

# Stands where a part is put in at loading: pickle gives the next of its `buffers`, whatever that
# is. Writable, because pickle makes a view of what is not.
MARK = pickle.PickleBuffer(bytearray())
# Buffers of this many bytes are worth a separate place.
APART_FROM = 16 * 1024


def take(part: Any) -> Any:
    """Return the part; pickled with MARK, it is the next one."""
    return part


def divider(parts: list[Any], apart_from: int) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a buffer callback for a pickler.

    It leaves out marks, whose parts are in the list already, and buffers of `apart_from` bytes and
    more, which it adds to the list.
    """

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer is MARK:
            return False
        if buffer.raw().nbytes < apart_from:
            return True
        parts.append(buffer)
        return False

    return is_inside
