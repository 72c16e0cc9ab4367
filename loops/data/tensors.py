"""Load data sets that consist of tensors, by selecting the rows of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, tee
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ...wrappers.steps.buffers import count_changes
from ..error_notes import describe, get_name
from ..rng import preserved_generators, preserved_rng
from .sampler import ShardedBatchSampler


class TensorLoader(DataLoader[Any]):
    """A loader that makes each batch by one ``index_select`` on each tensor of a data set.

    The batches equal the batches of a plain ``DataLoader``. A pass reads the tensors that the data
    set has when it begins.

    Args:
        dataset: a data set with an attribute ``tensors``: a tensor, or a sequence or mapping of
            tensors. Their rows, along the first dimension, are its samples.
        sampler: the order of the rows.
        device: the device of the batches, to which the tensors are copied once; None to use the
            tensors themselves.
        **options: further arguments of ``DataLoader``.

    Raises:
        TypeError: the data set has no such attribute.
        ValueError: the rows differ from the samples of the data set.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ShardedBatchSampler,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._rows = sampler.rows
        self._num_samples: int = len(dataset)  # type: ignore[arg-type]
        self._device = device
        self._read_tensors()

    def _read_tensors(self) -> None:
        self._tensors, self._build = _get_tensors(self.dataset, self._num_samples)
        # Kept, so that no other tensor can have the identity of one of these.
        self._sources = [(tensor, count_changes(tensor)) for tensor in self._tensors]
        self._check_samples([0, self._num_samples - 1])
        if self._device is not None:
            self._tensors = [tensor.to(self._device) for tensor in self._tensors]

    def __iter__(self) -> Any:
        dataset: Any = self.dataset
        present = _listed(dataset.tensors)
        pairs = zip(present, self._sources, strict=False)
        is_same = all(now is t and count_changes(t) == version for now, (t, version) in pairs)
        if not is_same or len(present) != len(self._sources):
            self._read_tensors()
        device = self._tensors[0].device
        pin = self.pin_memory and device.type == "cpu" and can_pin_memory()
        return self._batches(self._rows(device), pin)

    def _batches(self, rows: Iterable[Tensor], pin: bool = False) -> Iterator[Any]:
        # Only iterators written in C: no Python code runs for a batch, except to build a dict.
        pairs = zip(self._tensors, tee(rows, len(self._tensors)), strict=True)
        columns: list[Iterator[Tensor]] = [
            map(t.index_select, repeat(0), row_indices) for t, row_indices in pairs
        ]
        if pin:
            columns = [map(Tensor.pin_memory, column) for column in columns]
        return map(self._build, zip(*columns, strict=True))

    def _check_samples(self, indices: list[int]) -> None:
        """Raise ValueError if the rows of these indices differ from the samples."""
        selected = next(self._batches([torch.tensor(indices, device=self._tensors[0].device)]))
        with preserved_rng(), preserved_generators([self.dataset]):
            sample = next(iter(DataLoader(self.dataset, batch_sampler=[indices])))
        try:
            if type(selected) is not type(sample):
                raise AssertionError(
                    f"rows are {describe(selected)}, samples are {describe(sample)}"
                )
            assert_close(selected, sample, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise ValueError(
                "in_memory needs samples that equal the rows of the tensors, but in "
                f"{get_name(self.dataset)} they differ: {error}. Use in_memory=False"
            ) from error


def _get_tensors(
    dataset: Any, samples: int
) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    """Return the tensors of a data set, and a function that builds a batch from rows of each."""
    declared = getattr(dataset, "tensors", None)
    tensors = _listed(declared)
    build: Callable[[Any], Any] = list
    if isinstance(declared, Tensor):
        build = itemgetter(0)
    elif isinstance(declared, Mapping):
        names = list(declared)

        def build(columns: Iterable[Tensor]) -> dict[Any, Tensor]:
            return dict(zip(names, columns, strict=True))

    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        description = "has none" if declared is None else f"has {describe(declared, ranges=False)}"
        raise TypeError(
            "in_memory needs a data set with an attribute `tensors`, as TensorDataset: a tensor, "
            "or a sequence or mapping of tensors, whose rows along the first dimension are the "
            f"samples; {get_name(dataset)} {description}"
        )
    device = tensors[0].device
    if any(tensor.shape[:1] != (samples,) or tensor.device != device for tensor in tensors):
        description = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise ValueError(
            f"in_memory needs tensors with one row for each of the {samples} samples of "
            f"{get_name(dataset)}, all on one device, got {description}"
        )
    return tensors, build


def _listed(declared: Any) -> list[Any]:
    """Return the entries of a data set's attribute ``tensors``."""
    if isinstance(declared, Tensor):
        return [declared]
    if isinstance(declared, Mapping):
        return list(declared.values())
    return list(declared) if isinstance(declared, Sequence) else []


def can_pin_memory() -> bool:
    """Return whether there is an accelerator whose copies are faster from pinned memory."""
    device = torch.accelerator.current_accelerator(check_available=True)
    # For MPS, torch's loaders do not pin, and its tensors raise an error.
    return device is not None and device.type != "mps"


def selects_rows(dataset: Any, in_memory: Any, num_workers: int, collate: Any) -> bool:
    """Return whether to use a ``TensorLoader``.

    With "auto", use it only if nothing but the speed changes.
    """
    per_sample = num_workers or collate is not None
    if not in_memory or (in_memory == "auto" and per_sample):
        return False
    if per_sample:
        raise ValueError(
            "in_memory needs num_workers=0 and collate=None, since it reads no single samples, got "
            f"{num_workers} and {'None' if collate is None else get_name(collate)}"
        )
    kind = type(dataset)
    return in_memory != "auto" or (
        isinstance(dataset, TensorDataset)
        and kind.__getitem__ is TensorDataset.__getitem__
        and kind.__len__ is TensorDataset.__len__
        and not hasattr(dataset, "__getitems__")
        and all(
            type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
            for tensor in dataset.tensors
        )
    )
