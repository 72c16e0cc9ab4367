"""The weight of a micro-batch: its samples, its tokens, or what the user counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...registry import did_you_mean, import_path

_TARGETS = ("labels", "targets", "target")
_NAMED_TARGETS = "tokens needs an entry labels, targets or target with the targets"
_SECOND_ENTRY = "tokens needs a second entry with the targets"
_IGNORED = -100
_BY_NAME = ("samples", "tokens")
_INSTEAD = "name the entry whose sum is the weight, {key: ...}, or give a function of the batch"


class LossWeight:
    """What the losses of a batch are means over: how much of it there is in a batch.

    Args:
        setting: "samples": the first dimension of the first tensor. "tokens": the targets that are
            not -100, torch's ``ignore_index``; targets are the entry "labels", "targets" or
            "target", or the second one. ``{"key": name_or_index}``: the sum of that entry, a mask
            or weights. A function, or its import path, called with the preprocessed batch, that
            returns a number or a tensor without dimensions.

    Raises:
        TypeError, ValueError: the setting is none of these.
        ImportError: the path leads to nothing.
    """

    def __init__(self, setting: Any) -> None:
        self.setting = setting
        function = _read(setting)
        is_own = function in (_samples, _tokens)
        self._measure = function if is_own else partial(self._checked, function)

    def of(self, batch: Any) -> float | Tensor:
        """The weight of a preprocessed batch: a number, on accelerators maybe a 0-d tensor.

        Raises:
            KeyError: the batch has no such entry.
            ValueError: it is negative or not finite; of a tensor on an accelerator nobody looks.
        """
        return self._measure(batch)

    def _checked(self, function: Callable[[Any], Any], batch: Any) -> float | Tensor:
        found = function(batch)
        if isinstance(found, Tensor):
            if found.numel() != 1:
                shape = tuple(found.shape)
                raise ValueError(f"{self} must give one number for a batch, got shape {shape}")
            if not found.is_cpu:
                return found.detach().reshape(()).double()
            found = found.item()
        weight = float(found)
        if not 0 <= weight < math.inf:
            raise ValueError(f"{self} must give a finite number of at least 0, got {weight}")
        return weight

    def __repr__(self) -> str:
        return f"loss_weight={getattr(self.setting, '__qualname__', None) or repr(self.setting)}"


def _read(setting: Any) -> Callable[[Any], Any]:
    """The function that measures a batch."""
    if callable(setting):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting, Mapping):
        key = setting.get("key")
        if list(setting) != ["key"] or isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValueError(f"loss_weight must be {{key: name or index}}, got {dict(setting)!r}")
        return lambda batch: _summed(_entry(batch, key, f"{{key: {key!r}}} needs that entry"))
    if not isinstance(setting, str):
        raise TypeError(
            "loss_weight must be samples, tokens, {key: ...}, a function or its import path, "
            f"got {setting!r}"
        )
    if setting in _BY_NAME:
        return _samples if setting == "samples" else _tokens
    if "." not in setting:
        raise ValueError(
            f"loss_weight must be {', '.join(_BY_NAME)}, {{key: ...}} or the import path of a "
            f"function, got {setting!r}{did_you_mean(setting, _BY_NAME)}"
        )
    found = import_path(setting)
    if not callable(found):
        raise TypeError(f"loss_weight: {setting} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _samples(batch: Any) -> float:
    """The first dimension of the first tensor; the length of a list inside: it holds samples."""
    count = _first_count(batch)
    if count is None:
        raise KeyError(f"loss_weight=samples needs a tensor, but {_described(batch)}; {_INSTEAD}")
    return float(count)


def _first_count(data: Any) -> int | None:
    if isinstance(data, (tuple, list)):
        entries = data
    else:
        entries = (data,) if isinstance(data, Tensor) else getattr(data, "values", tuple)()
    for one in entries:
        if isinstance(one, Tensor):
            if shape := one.shape:
                return shape[0]
        elif isinstance(one, list):
            return len(one)
        elif isinstance(one, (tuple, Mapping)) and (count := _first_count(one)) is not None:
            return count
    return None


def _tokens(batch: Any) -> float | Tensor:
    is_pair = isinstance(batch, (tuple, list)) and len(batch) > 1
    target = batch[1] if is_pair else _target_in(batch)
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise TypeError(f"loss_weight=tokens counts targets in a tensor, got {kind}; {_INSTEAD}")
    count = (target != _IGNORED).count_nonzero()
    return float(count) if target.is_cpu else count.double()


def _target_in(batch: Any) -> Any:
    # Not isinstance(batch, Mapping), which takes as long as the counting.
    if hasattr(batch, "keys"):
        key = next((name for name in _TARGETS if name in batch), None)
        return _entry(batch, key, _NAMED_TARGETS)
    return _entry(batch, 1, _SECOND_ENTRY)


def _summed(entry: Any) -> Any:
    return entry.sum(dtype=torch.float64) if isinstance(entry, Tensor) else entry


def _entry(batch: Any, key: Any, needed: str) -> Any:
    # An index into a tensor would choose a sample.
    if not isinstance(batch, Tensor):
        try:
            return batch[key]
        except (LookupError, TypeError):
            pass
    raise KeyError(f"loss_weight={needed}, but {_described(batch)}; {_INSTEAD}")


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"the batch has the keys {list(batch)}"
    if isinstance(batch, (tuple, list)):
        return f"the batch has {len(batch)} entries"
    return f"the batch is of type {type(batch).__name__}"
