"""The weight of a micro-batch: its number of samples or tokens, or the result of a function."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...collectives import get_rank
from ...primitives.tensor_bits import widened, widest_float
from ...registry import did_you_mean, import_path
from ..steps.plain_models import predicts_next
from ..steps.preprocess import get_fields

logger = logging.getLogger(__name__)

_TARGETS = ("labels", "targets", "target")
_IGNORED = -100
_BY_NAME = ("samples", "tokens")
_INSTEAD = "name the entry whose sum is the weight, {key: ...}, or give a function of the batch"


class LossWeight:
    """Compute the weight of a batch: the number of items over which its loss is the mean.

    The setting has one of these forms:

    - "samples": the size of the first tensor's first dimension, or the length of the first list,
      whichever comes first in the batch.
    - "tokens": the number of targets that are not the ``ignore_index`` of the model's attribute
      ``loss``, or -100 if it has none. The targets are the entry "labels", "targets" or "target"
      of a mapping, or the second entry of a sequence.
      A causal language model of transformers does not predict the first label of a sequence, so
      that one is not counted.
    - ``{"key": name_or_index}``: the sum of this entry, a tensor such as a mask; or a number.
    - A function that takes the preprocessed batch and returns a number or a 0-d tensor, or the
      import path of such a function.

    Args:
        setting: "samples", "tokens", a mapping, a function or an import path.

    Raises:
        TypeError, ValueError: the setting has another form.
        ImportError: the import path does not exist.
    """

    def __init__(self, setting: Any) -> None:
        self.setting = setting
        self._measure = _load_function(setting)
        self._is_checked = False

    def of(self, batch: Any, model: Any = None) -> float | Tensor:
        """Return the weight of a preprocessed batch: a number, or a 0-d tensor on an accelerator.

        Args:
            batch: the batch.
            model: the user's model, from which "tokens" learns which labels it predicts.

        Raises:
            KeyError: an entry is missing in the batch.
            TypeError: the targets for "tokens" are not in a tensor, or the weight is not a number.
            ValueError: the weight is negative or not finite; not checked on an accelerator.
        """
        measure = self._measure
        loss = getattr(model, "loss", None)
        if not self._is_checked and loss is not None:
            self._is_checked = True
            _warn_of_other_means(self, loss)
        if self.setting == "tokens" and model is not None:
            ignored = getattr(loss, "ignore_index", _IGNORED)
            measure = partial(_count_tokens, skips_first=predicts_next(model), ignored=ignored)
        weight = measure(get_fields(batch))
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                shape = tuple(weight.shape)
                raise ValueError(f"{self} must give one number for a batch, got shape {shape}")
            if not weight.is_cpu:
                return widened(weight.detach().reshape(()))
            weight = weight.item()
        try:
            weight = float(weight)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self} must give a number or a tensor for a batch, got {type(weight).__name__}: "
                "convert it to a tensor in collate, or give a function of the batch"
            ) from error
        if not 0 <= weight < math.inf:
            raise ValueError(f"{self} must give a finite number of at least 0, got {weight}")
        return weight

    def __repr__(self) -> str:
        return f"loss_weight={getattr(self.setting, '__qualname__', None) or repr(self.setting)}"


def _load_function(setting: Any) -> Callable[[Any], Any]:
    """Return the function that measures a batch."""
    if callable(setting):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting, Mapping):
        key = setting.get("key")
        if list(setting) != ["key"] or isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValueError(f"loss_weight must be {{key: name or index}}, got {dict(setting)!r}")
        return lambda batch: _sum_of_entry(batch, key)
    if not isinstance(setting, str):
        raise TypeError(
            "loss_weight must be samples, tokens, {key: ...}, a function or its import path, "
            f"got {setting!r}"
        )
    if setting in _BY_NAME:
        return _samples if setting == "samples" else _count_tokens
    if "." not in setting:
        raise ValueError(
            f"loss_weight must be {', '.join(_BY_NAME)}, {{key: ...}} or the import path of a "
            f"function, got {setting!r}{did_you_mean(setting, _BY_NAME)}"
        )
    function = import_path(setting)
    if not callable(function):
        raise TypeError(f"loss_weight: {setting} must be a function, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _warn_of_other_means(weight: LossWeight, loss: Any) -> None:
    """Warn if a loss of torch is not a mean over samples or tokens."""
    name, problem = type(loss).__name__, ""
    if getattr(loss, "reduction", "mean") == "sum":
        problem = 'a sum (reduction="sum"): use "mean"'
    elif isinstance(getattr(loss, "weight", None), Tensor) and weight.setting in _BY_NAME:
        problem = (
            "a mean with class weights: give loss_weight a function that returns the sum of the "
            "weights of the targets"
        )
    if problem and get_rank() == 0:
        logger.warning("%r needs a loss that is a mean, but %s is %s", weight, name, problem)


def _samples(batch: Any) -> int:
    """Return the first dimension of the first tensor, or the length of a list in the batch."""
    count = _first_count([batch] if isinstance(batch, Tensor) else batch)
    if count is None:
        raise KeyError(f"loss_weight=samples needs a tensor, but {_described(batch)}; {_INSTEAD}")
    return count


def _first_count(data: Any) -> int | None:
    for entry in data if isinstance(data, (tuple, list)) else getattr(data, "values", tuple)():
        if isinstance(entry, Tensor):
            if entry.ndim:
                return len(entry)
        elif isinstance(entry, list):
            return len(entry)
        elif isinstance(entry, (tuple, Mapping)) and (count := _first_count(entry)) is not None:
            return count
    return None


def _count_tokens(batch: Any, skips_first: bool = False, ignored: int = _IGNORED) -> Tensor:
    if hasattr(batch, "keys") and not isinstance(batch, (tuple, list)):
        key = next((name for name in _TARGETS if name in batch), None)
        needed = "tokens needs an entry labels, targets or target with the targets"
        target = _entry(batch, key, needed)
    else:
        target = _entry(batch, 1, "tokens needs a second entry with the targets")
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise TypeError(f"loss_weight=tokens needs targets in a tensor, got {kind}; {_INSTEAD}")
    target = target[..., 1:] if skips_first and target.ndim else target
    return (target != ignored).count_nonzero()


def _sum_of_entry(batch: Any, key: Any) -> Any:
    entry = _entry(batch, key, f"{{key: {key!r}}} needs that entry")
    return entry.sum(dtype=widest_float(entry.device)) if isinstance(entry, Tensor) else entry


def _entry(batch: Any, key: Any, needed: str) -> Any:
    # Indexing a tensor would select a sample, not an entry.
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
