"""Out-of-band parts of a pickle, listed in the order of their placeholders.

Imports no torch, because many processes handle no tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

# A placeholder in a pickle. `pickle.loads` replaces it with the next item of its `buffers`, which
# may be any object. The placeholder is writable, because pickle would replace a read-only
# placeholder with a read-only view of the item.
MARK = pickle.PickleBuffer(bytearray())
# Buffers of at least this many bytes are kept out of the pickle.
OUT_OF_BAND_BYTES = 16 * 1024


def take(payload: Any) -> Any:
    """Return the argument. A pickled ``take(MARK)`` stands for the next out-of-band part."""
    return payload


def divider(payloads: list[Any], apart_from: int) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a ``buffer_callback`` for pickle that moves large buffers to ``payloads``.

    Buffers of at least ``apart_from`` bytes are appended to ``payloads``, not to the pickle.
    Placeholders stay out of the pickle too, but are not appended: ``payloads`` already has their
    values.
    """

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer is MARK:
            return False
        if buffer.raw().nbytes < apart_from:
            return True
        payloads.append(buffer)
        return False

    return is_inside
