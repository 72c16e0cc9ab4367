"""Move batches to the device of the model, and normalise their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...registry import MODELS
from ..layout import compute_device

# The dicts of a module that hold its hooks.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def get_fields(batch: Any) -> Any:
    """Return the fields of a dataclass by name; return any other batch unchanged.

    Dataclasses that are also mappings, such as the outputs of transformers, are returned unchanged.
    """
    if is_dataclass(batch) and not isinstance(batch, (type, Mapping)):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch


def path_to_samples(batch: Any) -> tuple[Any, ...] | None:
    """Return the path to a part of the batch whose length is the number of samples, or None.

    This part is a list of mappings, such as a detector's targets, or the first tensor with
    dimensions.
    """
    if isinstance(batch, Tensor):
        return () if batch.dim() else None
    children: Any = ()
    if isinstance(batch, Mapping):
        children = batch.items()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        children = enumerate(batch)
    children = list(children)
    for key, child in children:
        if isinstance(child, list) and child and isinstance(child[0], Mapping):
            return (key,)
    for key, child in children:
        below = path_to_samples(child)
        if below is not None:
            return (key, *below)
    return None


def move(data: Any, device: torch.device, non_blocking: bool | None = None) -> Any:
    """Move the tensors in nested ``data`` to ``device``, as ``DataPreprocessor.cast_data`` does."""
    if type(data) is list:
        return _move_all(data, device, non_blocking)
    if isinstance(data, Tensor):
        if data.device == device:
            return data
        is_async = data.is_pinned() if non_blocking is None else non_blocking
        return data.to(device, non_blocking=is_async)
    # Checked before mappings: isinstance(..., Mapping) is slow, and a batch may have many numbers.
    if data is None or isinstance(data, (str, bytes, bytearray, int, float)):
        return data
    if isinstance(data, Mapping):
        return dict(zip(data, _move_all(data.values(), device, non_blocking), strict=True))
    if callable(getattr(data, "to", None)):
        # Some classes have a ``to`` that takes only the device.
        return data.to(device, non_blocking=True) if non_blocking else data.to(device)
    if (entries := get_fields(data)) is not data:
        moved = copy(data)
        for name, entry in entries.items():
            # Unlike setattr(), this works for frozen dataclasses too.
            object.__setattr__(moved, name, move(entry, device, non_blocking))
        return moved
    if not isinstance(data, Sequence) or isinstance(data, (range, memoryview)):
        return data
    return _rebuilt(data, _move_all(data, device, non_blocking))


def _move_all(entries: Iterable[Any], device: torch.device, non_blocking: bool | None) -> list[Any]:
    # Common case: the tensor is on the device already. Skipping the call saves time.
    return [
        entry
        if isinstance(entry, Tensor) and entry.device == device
        else move(entry, device, non_blocking)
        for entry in entries
    ]


def _rebuilt(data: Any, entries: list[Any]) -> Any:
    """Return ``entries`` as a sequence or namedtuple of the type of ``data``."""
    return type(data)(*entries) if hasattr(data, "_fields") else type(data)(entries)


def as_call(data: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return a preprocessed batch as positional and keyword arguments of ``forward``.

    A mapping gives keyword arguments, and so do the fields of a dataclass.

    Raises:
        TypeError: the batch is not a list, tuple, mapping or dataclass.
    """
    if isinstance(data, (list, tuple)):
        return data, {}
    named = get_fields(data)
    if isinstance(named, Mapping):
        return (), named if isinstance(named, dict) else dict(named)
    raise TypeError(
        "Output of `data_preprocessor` should be list, tuple or dict, but got "
        f"{type(data).__name__}"
    )


def get_device(module: nn.Module) -> torch.device:
    """Return the device on which a model computes.

    This is the device of its first parameter or buffer; without any, torch's default device.
    """
    tensor: Tensor | None = next(chain(module.parameters(), module.buffers()), None)
    return torch.get_default_device() if tensor is None else compute_device(tensor)


@MODELS.register_module(name=["DataPreprocessor", "BaseDataPreprocessor"])
class DataPreprocessor(nn.Module):
    """A module that moves batches to the device of the model and can normalise their input.

    The device follows ``to()``, ``cuda()`` and ``cpu()`` of any module that contains this one.
    A subclass may override ``cast_data(data)``, which moves a batch, or
    ``forward(data, training=False)``::

        class Flip(DataPreprocessor):
            def forward(self, data, training=False):
                image, target = super().forward(data, training)
                return (image.flip(-1) if training else image), target

    Args:
        mean: subtracted from the input; one number, or one for each channel (dimension 1).
        std: the divisor of the input after the subtraction; one number, or one for each channel.
        input_key: the entry to normalise; default: the first of a sequence, "inputs" of a
            mapping.
        non_blocking: whether to copy tensors without waiting for the copy to end; default: True
            for tensors in pinned memory, False for others.

    Raises:
        TypeError: ``mean`` or ``std`` is not a number or a list of numbers.
        ValueError: ``std`` is not positive.
    """

    def __init__(
        self,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        *,
        input_key: int | str | None = None,
        non_blocking: bool | None = None,
    ) -> None:
        super().__init__()
        self.input_key = input_key
        self.non_blocking = non_blocking
        self._mean, self._std = _numbers("mean", mean), _numbers("std", std)
        if self._std is not None and min(self._std) <= 0:
            raise ValueError(f"std must be positive, got {std!r}")
        self._set_device(torch.empty(0))

    @property
    def device(self) -> torch.device:
        """The device to which batches are moved."""
        return self._device

    def forward(self, data: Any, training: bool = False) -> Any:
        """Move ``data``, and normalise its input if a mean or std was given."""
        data = self.cast_data(data)
        return data if self._mean is None and self._std is None else self._replace_input(data)

    def cast_data(self, data: Any) -> Any:
        """Move every tensor in nested ``data`` to the device.

        Mappings become plain dicts, and so does a batch that is a dataclass. Sequences, namedtuples
        and dataclasses inside the batch keep their type. Other objects are moved by their method
        ``to`` if they have one.
        """
        # Common case: a flat sequence of tensors that are on the device already.
        for entry in data if type(data) in (list, tuple) else (None,):
            if not (isinstance(entry, Tensor) and entry.device == self._device):
                return move(get_fields(data), self._device, self.non_blocking)
        return data

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataPreprocessor:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # torch calls this method whenever a module is moved or converted.
        self._set_device(fn(torch.empty(0, dtype=self._dtype, device=self._device)))
        return self

    def _set_device(self, probe: Tensor) -> None:
        self._device, self._dtype = probe.device, probe.dtype
        # Not buffers: DDP would broadcast them in every step, and checkpoints would contain them.
        self._shift = None if self._mean is None else probe.new_tensor(self._mean)
        self._scale = None if self._std is None else probe.new_tensor(self._std)

    def _replace_input(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return self._normalise(data)
        key = self.input_key
        if isinstance(data, dict):
            key = "inputs" if key is None else key
            if key not in data:
                raise KeyError(f"input_key {key!r} is not in the batch; it has {list(data)}")
            return {**data, key: self._normalise(data[key])}
        index = 0 if key is None else key
        if not isinstance(index, int) or not isinstance(data, (list, tuple)):
            raise TypeError(
                f"cannot normalise entry {index!r} of a batch of type {type(data).__name__}; "
                "input_key must be an index of a list or tuple, or a key of a dict"
            )
        entries = list(data)
        entries[index] = self._normalise(entries[index])
        return _rebuilt(data, entries)

    def _normalise(self, inputs: Tensor) -> Tensor:
        shape = (-1, *(1,) * (inputs.ndim - 2))
        if self._shift is not None:
            inputs = inputs - self._shift.view(shape)
        if self._scale is not None:
            inputs = inputs / self._scale.view(shape)
        return inputs


class Preprocessing:
    """Give a model wrapper the method that prepares its batches."""

    module: Any
    # Used if the model has no ``data_preprocessor``.
    _preprocessor: DataPreprocessor

    def preprocess(self, data: Any, training: bool) -> Any:
        """Prepare a batch by the model's ``data_preprocessor``, or move it to the model's device.

        Raises:
            TypeError: the result is not a list, tuple, mapping or dataclass.
        """
        preprocessor = getattr(self.module, "data_preprocessor", None)
        batch = (self._preprocessor if preprocessor is None else preprocessor)(
            data, training=training
        )
        return batch if isinstance(batch, (list, tuple, dict)) else as_call(batch)[1]

    def add_preprocessor(self) -> None:
        """Create the preprocessor if the model has none."""
        if getattr(self.module, "data_preprocessor", None) is None:
            self._preprocessor = DataPreprocessor().to(get_device(self.module))


def only_moves(wrapper: Any) -> bool:
    """Return whether a wrapper's preprocessor only moves batches to the device."""
    preprocessor = getattr(wrapper.module, "data_preprocessor", None)
    preprocess = wrapper._preprocessor if preprocessor is None else preprocessor
    return (
        type(preprocess) is DataPreprocessor
        and preprocess._mean is None
        and preprocess._std is None
        and not any(getattr(preprocess, hooks) for hooks in MODULE_HOOKS)
    )


def _numbers(name: str, value: float | Sequence[float] | None) -> list[float] | None:
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value}; pass non_blocking by name")
    numbers = [value] if isinstance(value, (int, float)) else list(value)
    if not numbers or not all(isinstance(number, (int, float)) for number in numbers):
        raise TypeError(f"{name} must be a number or a list of numbers, got {value!r}")
    return [float(number) for number in numbers]
