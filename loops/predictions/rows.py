"""The outputs of an evaluation step as one row per sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...wrappers.steps.preprocess import get_fields
from ..error_notes import describe

Row = dict[str, Any]
# The field of outputs that are not mappings.
PREDICTION = "prediction"
_IDS = ("id", "sample_id")
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def make_rows(outputs: Any, batch: Any, count: int | None) -> list[Row]:
    """Split the outputs of a batch into one row per sample.

    If the outputs are a mapping, a row has the fields with one value per sample; others, such as a
    mean loss, are left out. If they are a sequence of mappings, these are the rows. Any other
    output becomes the field ``prediction``. If the batch is a mapping with the key ``id`` or
    ``sample_id``, the rows have this field too.

    Args:
        outputs: the result of ``test_step``: a mapping, a tensor whose first dimension is the
            samples, or a sequence with one value per sample.
        batch: the batch as the loader yielded it.
        count: the number of samples in the batch; None to take it from the outputs.

    Raises:
        TypeError: nothing in the outputs has one value per sample.
    """
    count = _count(outputs) if count is None else count
    if isinstance(outputs, Mapping):
        rows = _rows_of_fields(outputs, count)
    else:
        column = _column(list(outputs) if type(outputs) is tuple else outputs, count) or []
        rows = [entry if isinstance(entry, dict) else {PREDICTION: entry} for entry in column]
    if not rows or not rows[0]:
        raise TypeError(
            "predictions need a test_step that returns a tensor, a sequence or fields with one "
            f"value for each of the {count} samples of a batch, got {describe(outputs)}"
        )
    batch_fields = get_fields(batch) if isinstance(get_fields(batch), Mapping) else {}
    ids = _rows_of_fields({key: batch_fields[key] for key in _IDS if key in batch_fields}, count)
    return [{**row_ids, **row} for row_ids, row in zip(ids, rows, strict=True)]


def _rows_of_fields(fields: Mapping[Any, Any], count: int) -> list[Row]:
    # Outputs of transformers models contain the logits twice: metrics get them as `preds`.
    repeated = fields.get("preds") is fields.get("logits") and "logits" in fields
    columns = {
        str(name): _column(value, count)
        for name, value in fields.items()
        if not (repeated and name == "preds")
    }
    present = {name: column for name, column in columns.items() if column is not None}
    return [{name: column[at] for name, column in present.items()} for at in range(count)]


def _count(outputs: Any) -> int:
    """Return the number of samples in outputs: the length of the first field that has one."""
    fields = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return next((len(field) for field in fields if _has_length(field)), 0)


def _has_length(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _column(value: Any, count: int) -> list[Any] | None:
    """Return one plain value per sample, or None if ``value`` does not have that many."""
    # In the outputs of transformers models, a tuple has one entry per layer, not per sample.
    if not _has_length(value) or len(value) != count or type(value) is tuple:
        return None
    if isinstance(value, Tensor):
        value = _array(value)
    return [_plain(entry) for entry in value]


def _array(value: Tensor) -> Any:
    value = value.detach().cpu()
    # NumPy has no types such as bfloat16 and float8.
    is_known = not value.is_floating_point() or value.dtype in _NUMPY_FLOATS
    return (value if is_known else value.float()).numpy()


def _plain(value: Any) -> Any:
    """Return ``value`` as numbers, texts, NumPy arrays, lists and dicts.

    Raises:
        TypeError: it holds an object of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        value = _array(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "c":
        return value
    if callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    is_complex = isinstance(value, np.ndarray)
    if isinstance(value, Iterable) and not is_complex:
        return [_plain(entry) for entry in value]
    raise TypeError(
        "a prediction must be made of real numbers, texts, tensors, lists and mappings, got "
        f"{'complex numbers' if is_complex else type(value).__name__}"
    )
