"""States in the form that torch.load(weights_only=True) accepts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_AS_THEY_ARE = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def plain(value: Any, where: str) -> Any:
    """Return `value` with its containers copied and NumPy scalars made numbers.

    Raises:
        TypeError: Something in it cannot be loaded safely; says where.
    """
    if type(value) in _AS_THEY_ARE or isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        items = {plain(k, f"{where} key"): plain(v, f"{where}.{k}") for k, v in value.items()}
        if isinstance(value, OrderedDict):
            return OrderedDict(items)
        return Counter(items) if isinstance(value, Counter) else items
    if type(value) in (list, tuple, set, torch.Size):
        return type(value)(plain(item, f"{where}.{i}") for i, item in enumerate(value))
    for number in (bool, int, float):
        # bool first: a NumPy bool is none of them but has item(), as all NumPy scalars.
        if isinstance(value, number):
            return number(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds "
        "tensors, numbers, strings, lists, tuples, sets and dicts only, so that it loads safely"
    )
