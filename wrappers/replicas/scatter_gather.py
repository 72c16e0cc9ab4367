"""Split a batch over the copies of a module, and join what they return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import gather as torch_gather
from torch.nn.parallel import scatter as torch_scatter

from ..steps.preprocess import move

Scattered = tuple[Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]]
Scatter = Callable[[tuple[Any, ...], dict[str, Any], Sequence[torch.device], int], Scattered]
Gather = Callable[[Sequence[Any], torch.device, int], Any]


def scatter_batch(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int = 0
) -> Scattered:
    """Cut every tensor into chunks along ``dim``, as ``torch.chunk`` cuts it.

    Goes into dicts, lists, tuples and namedtuples. Tensors without dimensions go to every
    copy, other objects by reference. There may be fewer chunks than devices: 5 samples for 3
    devices give 2, 2, 1, and 4 give 2, 2. Without any tensor every device gets the arguments.

    Returns:
        The positional and the keyword arguments of every copy, both of the same length; both
        empty when there are no arguments.

    Raises:
        ValueError: two tensors would be cut into different numbers of chunks, or a tensor has
            no dimension ``dim``.
    """
    if not inputs and not kwargs:
        return [], []
    tensors = list(_tensors((inputs, kwargs)))
    used = devices[: _count(tensors, len(devices), dim)]
    chunks = {id(tensor): _chunks(tensor, used, dim) for _, tensor in tensors}

    def part_of(data: Any, index: int) -> Any:
        return join([data], lambda one: chunks[id(one[0])][index], lambda one: one[0])

    places = range(len(used))
    return [part_of(inputs, index) for index in places], [part_of(kwargs, one) for one in places]


def user_scattered(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int = 0
) -> Scattered:
    """Take a batch that the caller has split already: one list with an entry per device.

    Give it as ``scatter=user_scattered``. Entry i goes to device i, tensors inside moved, and
    becomes the only positional argument of copy i; entries may differ in size.

    Raises:
        ValueError: there are keyword arguments, or not exactly one positional argument, or it
            is no list or tuple with an entry per device.
    """
    if kwargs:
        raise ValueError(f"user_scattered takes no keyword arguments, got {', '.join(kwargs)}")
    if len(inputs) != 1 or not isinstance(inputs[0], (list, tuple)):
        found = ", ".join(type(one).__name__ for one in inputs) or "nothing"
        raise ValueError(
            f"user_scattered takes one list or tuple with an entry per device, got {found}"
        )
    entries = inputs[0]
    if len(entries) != len(devices):
        raise ValueError(
            f"user_scattered needs one entry per device: {len(devices)} devices, "
            f"got {len(entries)} entries"
        )
    moved = [(move(one, device),) for one, device in zip(entries, devices, strict=True)]
    return moved, [{} for _ in devices]


def dict_gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join what the copies returned, leaf by leaf, in the order of the copies.

    Tensors are concatenated along ``dim``, those without dimensions stacked to ``(copies,)``.
    Dicts, lists and tuples are joined entry by entry, None stays None, and anything else (a
    string, a number) becomes the list of what the copies returned.

    Raises:
        ValueError: the copies returned different keys, lengths or types.
    """

    def leaf(parts: list[Tensor]) -> Tensor:
        if len({part.ndim for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"copies returned tensors of different dimensions: shapes {shapes}")
        if not parts[0].ndim:
            return torch.stack([part.to(device) for part in parts])
        if device.type == "cuda" and all(part.is_cuda for part in parts):
            gathered: Tensor = torch_gather(parts, device, dim)
            return gathered
        return torch.cat([part.to(device) for part in parts], dim)

    return join(outputs, leaf)


def join(
    outputs: Sequence[Any],
    leaf: Callable[[list[Tensor]], Tensor],
    other: Callable[[list[Any]], Any] = list,
) -> Any:
    """Join nested ``outputs``: tensors of one place by ``leaf``, what is no container by ``other``.

    Raises:
        ValueError: the copies returned different keys, lengths or types.
    """
    if not outputs:
        raise ValueError("outputs must be those of one copy at least, got none")
    first = outputs[0]
    if all(isinstance(one, Tensor) for one in outputs):
        return leaf(list(outputs))
    if any(type(one) is not type(first) for one in outputs):
        raise ValueError(f"copies returned different types: {_listed(outputs, type)}")
    if first is None:
        return None
    if isinstance(first, Mapping):
        if any(one.keys() != first.keys() for one in outputs):
            raise ValueError(f"copies returned different keys: {_listed(outputs, list)}")
        items = {key: join([one[key] for one in outputs], leaf, other) for key in first}
        if not isinstance(first, dict):
            return items
        # Not by its type: a defaultdict takes its factory first.
        again = copy.copy(first)
        # Hugging Face's outputs refuse their own `update`; this one sets each item.
        MutableMapping.update(again, items)
        return again
    if isinstance(first, (list, tuple)):
        if any(len(one) != len(first) for one in outputs):
            raise ValueError(f"copies returned different lengths: {_listed(outputs, len)}")
        parts = [join(column, leaf, other) for column in zip(*outputs, strict=True)]
        kind: Any = type(first)
        return kind(*parts) if hasattr(first, "_fields") else kind(parts)
    return other(list(outputs))


def share_of_each(
    inputs: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]], dim: int
) -> list[float]:
    """The part of the batch that each copy has, by the first tensor among its arguments."""
    copies = len(inputs)
    sizes = []
    for arguments in zip(inputs, kwargs, strict=True):
        tensor = next((one for _, one in _tensors(arguments) if one.ndim), None)
        if tensor is None:
            return [1 / copies] * copies
        sizes.append(tensor.shape[dim])
    total = sum(sizes)
    return [size / total if total else 1 / copies for size in sizes]


def _count(tensors: Sequence[tuple[str, Tensor]], devices: int, dim: int) -> int:
    """Into how many chunks the tensors of a batch are cut, which must be the same for all."""
    counts: dict[int, str] = {}
    for path, tensor in tensors:
        if not tensor.ndim:
            continue
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"{path} of shape {tuple(tensor.shape)} cannot be split along dim={dim}"
            )
        count = len(tensor.chunk(devices, dim))
        counts.setdefault(count, f"{path} of size {tensor.shape[dim]}")
    if len(counts) > 1:
        found = ", ".join(f"{what} into {count} chunks" for count, what in counts.items())
        raise ValueError(
            f"over {devices} devices along dim={dim}, tensors are split differently: {found}; "
            "give what is not to be split in another form than a tensor"
        )
    return next(iter(counts), devices)


def _tensors(data: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested ``data`` and how to reach it from the arguments."""
    if isinstance(data, Tensor):
        yield f"argument {path}", data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _tensors(value, f"{path}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from _tensors(value, f"{path}[{index}]")


def _chunks(tensor: Tensor, devices: Sequence[torch.device], dim: int) -> list[Tensor]:
    if not tensor.ndim:
        return [tensor.to(device) for device in devices]
    if all(device.type == "cuda" for device in devices):
        return list(torch_scatter(tensor, devices, dim))
    chunks = tensor.chunk(len(devices), dim)
    return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=True)]


def _listed(outputs: Sequence[Any], what: Callable[[Any], Any]) -> str:
    """What every copy has, for a message."""
    found = [what(one) for one in outputs]
    named = [one.__name__ if isinstance(one, type) else one for one in found]
    return ", ".join(f"copy {copy_id} {one}" for copy_id, one in enumerate(named))
