"""Samplers of a data set by weight, by class and by index."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Sampler, Subset, WeightedRandomSampler

from ...registry import SAMPLERS, did_you_mean
from ..error_notes import get_name

# The attributes and columns in which data sets usually keep one label for each sample.
_LABELS = ("targets", "labels", "label", "y")
_BALANCED = "class_balanced"
# torch.multinomial refuses more weights.
_MOST_WEIGHTS = 2**24


@SAMPLERS.register_module(name=["WeightedSampler", "weighted"])
class WeightedSampler(WeightedRandomSampler):
    """Draw samples with a probability in proportion to their weights.

    It draws like ``torch.utils.data.WeightedRandomSampler``.

    Args:
        dataset: a map-style data set.
        weights: "class_balanced" makes all classes equally frequent. A mapping or a list has one
            weight for each class; a list with as many entries as samples, one for each sample. Any
            other text is the attribute or column of the data set with one weight for each sample,
            or the path of a file with them: numbers separated by white space, or ``.npy``.
        labels: the attribute or column of the data set with the class of each sample, or the
            classes themselves. Default: ``targets``, ``labels``, ``label`` or ``y``, or the last
            tensor of a ``TensorDataset``.
        num_samples: draws in an epoch. Default: the number of samples.
        replacement: whether a sample may be drawn several times in an epoch.

    Raises:
        TypeError: a weight is not a number.
        ValueError: the weights do not fit the data set, or its labels cannot be read.
    """

    def __init__(
        self,
        dataset: Any,
        weights: str | Mapping[Any, float] | Sequence[float] = _BALANCED,
        *,
        labels: str | Sequence[Any] | None = None,
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        size = len(dataset)
        if size > _MOST_WEIGHTS:
            raise ValueError(
                f"torch draws from at most {_MOST_WEIGHTS} weights, got {size}: draw from groups "
                "of samples, by your own sampler"
            )
        numbers = torch.tensor(_sample_weights(dataset, weights, labels), dtype=torch.float64)
        if len(numbers) != size:
            raise ValueError(
                f"weights must have one entry for each of the {size} samples of "
                f"{get_name(dataset)}, got {len(numbers)}"
            )
        count = size if num_samples is None else num_samples
        positive = int((numbers > 0).sum())
        if not positive or not numbers.isfinite().all() or (numbers < 0).any():
            raise ValueError("weights must be finite, 0 or more, and not all of them 0")
        if not replacement and count > positive:
            raise ValueError(
                f"num_samples must be at most {positive}, the number of samples with a weight, "
                f"since replacement is false, got {count}"
            )
        super().__init__(numbers.tolist(), count, replacement)


@SAMPLERS.register_module(name=["SubsetSampler", "subset"])
class SubsetSampler(Sampler[int]):
    """Draw only some samples of a data set, each once in an epoch.

    Args:
        dataset: a map-style data set.
        indices: the samples, as a list or as text with ranges that include their ends, "0-99, 150".
        share: instead of ``indices``, draw this share of all samples, chosen at random by ``seed``.
        seed: the seed of the choice.
        shuffle: whether each epoch has a new order.

    Raises:
        ValueError: ``indices`` or ``share`` is missing or out of range.
    """

    def __init__(
        self,
        dataset: Any,
        indices: str | Sequence[int] | None = None,
        *,
        share: float | None = None,
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        size = len(dataset)
        if (indices is None) == (share is None):
            raise ValueError("SubsetSampler needs indices or share, and not both")
        if share is not None:
            if not 0 < share <= 1:
                raise ValueError(f"share must be above 0 and at most 1, got {share}")
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(size, generator=generator)[: max(1, round(share * size))]
            indices = sorted(chosen.tolist())
        self.indices = _parse_ranges(indices) if isinstance(indices, str) else list(indices or ())
        wrong = [index for index in self.indices if not 0 <= index < size]
        if wrong or not self.indices:
            value = wrong[0] if wrong else "none"
            raise ValueError(
                f"indices must be from 0 to {size - 1}, the last sample of {get_name(dataset)}, "
                f"got {value}"
            )
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        count = len(self.indices)
        order = torch.randperm(count).tolist() if self.shuffle else range(count)
        return map(self.indices.__getitem__, order)


def _parse_ranges(text: str) -> list[int]:
    indices: list[int] = []
    for entry in text.split(","):
        begin, _, end = entry.partition("-")
        try:
            indices += range(int(begin), int(end or begin) + 1)
        except ValueError as error:
            raise ValueError(f'indices must be like "0-99, 150", got {text!r}') from error
    return indices


def _sample_weights(dataset: Any, weights: Any, labels: Any) -> list[float]:
    """Return the weight of each sample."""
    if isinstance(weights, str) and weights != _BALANCED:
        column = _find_column(dataset, weights)
        return _read_numbers(dataset, weights) if column is None else _list_values(column)
    if not isinstance(weights, str | Mapping):
        weights = _list_values(weights)
        if len(weights) == len(dataset):
            return [float(weight) for weight in weights]
    classes = read_labels(dataset, labels)
    counts = Counter(classes)
    if isinstance(weights, str):
        weights = {name: 1 / count for name, count in counts.items()}
    elif not isinstance(weights, Mapping):
        weights = _class_weights(weights, counts, len(dataset))
    names = [str(name) for name in counts]
    for name in weights:
        if name not in counts:
            raise ValueError(
                f"weights has the class {name!r}, which no sample of {get_name(dataset)} has"
                f"{did_you_mean(str(name), names)}; the classes are {_join(counts)}"
            )
    missing = [name for name in counts if name not in weights]
    if missing:
        raise ValueError(f"weights must have every class, but lacks {_join(missing)}")
    return [float(weights[name]) for name in classes]


def _class_weights(weights: list[Any], counts: Mapping[Any, int], size: int) -> dict[Any, Any]:
    if set(counts) <= set(range(len(weights))) and max(counts) == len(weights) - 1:
        return {name: weight for name, weight in enumerate(weights) if name in counts}
    raise ValueError(
        f"a list of weights must have an entry for each of the {size} samples, or for each class "
        f"from 0 to the last one, got {len(weights)} entries; the classes are {_join(counts)}"
    )


def _join(names: Iterable[Any], most: int = 10) -> str:
    texts = sorted(map(str, names), key=lambda text: (len(text), text))
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def read_labels(dataset: Any, labels: str | Sequence[Any] | None = None) -> list[Any]:
    """Return the class of each sample, without reading samples.

    Args:
        dataset: a map-style data set, also in ``Subset`` and ``ConcatDataset``.
        labels: the name of the attribute or column, or the classes themselves; None to look for a
            usual name.

    Raises:
        ValueError: labels are missing, or some samples have none.
    """
    remedy = (
        "set labels to the attribute or column with the class of each sample, or to a list of the "
        "classes"
    )
    if labels is None:
        columns = (_find_column(dataset, name) for name in (*_LABELS, None))
        column = next((entry for entry in columns if _fits(entry, dataset)), None)
        if column is None:
            raise ValueError(
                f"{get_name(dataset)} has no attribute or column {', '.join(_LABELS)} with one "
                f"label for each of its {len(dataset)} samples: {remedy}"
            )
    elif isinstance(labels, str):
        column = _find_column(dataset, labels)
        if column is None:
            names = [*getattr(dataset, "column_names", ()), *getattr(dataset, "__dict__", ())]
            raise ValueError(
                f"labels: {get_name(dataset)} has no attribute or column {labels!r}"
                f"{did_you_mean(labels, names)}; {remedy}"
            )
    else:
        column = labels
    classes = _list_values(column)
    if len(classes) != len(dataset):
        raise ValueError(
            f"labels must have one entry for each of the {len(dataset)} samples of "
            f"{get_name(dataset)}, got {len(classes)}; {remedy}"
        )
    if any(isinstance(name, list | dict) for name in classes):
        raise ValueError(
            f"labels must be one class for each sample, but the labels of {get_name(dataset)} are "
            "lists; pass one weight for each sample"
        )
    return classes


def _fits(column: Any, dataset: Any) -> bool:
    return hasattr(column, "__len__") and len(column) == len(dataset)


def _find_column(dataset: Any, name: str | None) -> Any:
    """Return an attribute or column of a data set; None if it has none of that name.

    Without a name, it is the last of a data set's tensors if this may be the labels.
    """
    if isinstance(dataset, Subset):
        column = _find_column(dataset.dataset, name)
        return None if column is None else [column[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        columns = [_find_column(inner, name) for inner in dataset.datasets]
        has_all = all(column is not None for column in columns)
        return list(itertools.chain(*map(_list_values, columns))) if has_all else None
    if name is None:
        tensors = getattr(dataset, "tensors", None)
        labels = tensors[-1] if isinstance(tensors, tuple | list) and tensors else None
        if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
            return None
        return labels
    if name in (getattr(dataset, "column_names", None) or ()):
        # A data set of Hugging Face, whose format may convert the values.
        return dataset.with_format(None)[name]
    return getattr(dataset, name, None)


def _list_values(column: Any) -> list[Any]:
    if hasattr(column, "tolist"):
        listed: list[Any] = column.tolist()
        return listed
    # Single tensors and NumPy's numbers have another hash than Python's.
    return [entry.item() if hasattr(entry, "item") else entry for entry in column]


def _read_numbers(dataset: Any, path: str) -> list[float]:
    if not Path(path).is_file():
        names = [_BALANCED, *getattr(dataset, "__dict__", ())]
        raise ValueError(
            f"weights must be {_BALANCED!r}, numbers, an attribute or column of "
            f"{get_name(dataset)}, or a file, got {path!r}{did_you_mean(path, names)}"
        )
    if path.endswith(".npy"):
        import numpy

        return _list_values(numpy.load(path, allow_pickle=False))
    return [float(number) for number in Path(path).read_text(encoding="utf-8").split()]
