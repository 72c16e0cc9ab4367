"""Split a batch over the copies of a module, and join their outputs."""

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
    """Split every tensor along ``dim`` as ``torch.chunk`` does.

    Tensors may be nested in dicts, lists, tuples and namedtuples. Tensors without dimensions and
    other objects are passed to every copy. There may be fewer chunks than devices: with 3 devices,
    5 samples are split into 2, 2 and 1, but 4 samples into 2 and 2. Without any tensor, every
    device gets all arguments.

    Returns:
        The positional and the keyword arguments of every copy, in two lists of the same length;
        both are empty if there are no arguments.

    Raises:
        ValueError: two tensors would give different numbers of chunks, or a tensor has no
            dimension ``dim``.
    """
    if not inputs and not kwargs:
        return [], []
    tensors = list(_tensors((inputs, kwargs)))
    used = devices[: _count(tensors, len(devices), dim)]
    chunks = {id(tensor): _chunks(tensor, used, dim) for _, tensor in tensors}

    def get_part(data: Any, copy_id: int) -> Any:
        return join([data], lambda values: chunks[id(values[0])][copy_id], lambda values: values[0])

    copies = range(len(used))
    return [get_part(inputs, copy_index) for copy_index in copies], [
        get_part(kwargs, copy_index) for copy_index in copies
    ]


def user_scattered(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int = 0
) -> Scattered:
    """Distribute a batch that the caller has split already, as a list with one entry per device.

    Use it as ``scatter=user_scattered``. Entry i is moved to device i and becomes the only
    positional argument of copy i. Entries may differ in size.

    Raises:
        ValueError: there are keyword arguments, or the positional arguments are not a single
            list or tuple with one entry per device.
    """
    if kwargs:
        raise ValueError(f"user_scattered takes no keyword arguments, got {', '.join(kwargs)}")
    if len(inputs) != 1 or not isinstance(inputs[0], (list, tuple)):
        kinds = ", ".join(type(value).__name__ for value in inputs) or "nothing"
        raise ValueError(
            f"user_scattered takes one list or tuple with an entry per device, got {kinds}"
        )
    entries = inputs[0]
    if len(entries) != len(devices):
        raise ValueError(
            f"user_scattered needs one entry per device: {len(devices)} devices, "
            f"got {len(entries)} entries"
        )
    moved = [(move(entry, device),) for entry, device in zip(entries, devices, strict=True)]
    return moved, [{} for _ in devices]


def scatter_samples(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int = 0
) -> Scattered:
    """Split arguments that are sequences of samples, such as images of different sizes.

    A strategy for ``scatter=scatter_samples``. Lists, tuples and tensors are split along the
    samples as ``torch.chunk`` does; other objects are passed to every copy.
    """
    named = [*inputs, *kwargs.values()]
    size = max(
        (len(value) for value in named if isinstance(value, (list, tuple, Tensor))), default=0
    )
    step = max(1, -(-size // len(devices)))
    starts = range(0, max(size, 1), step)

    def get_part(value: Any, start: int, device: torch.device) -> Any:
        is_split = isinstance(value, (list, tuple, Tensor))
        return move(value[start : start + step] if is_split else value, device)

    pairs = list(zip(starts, devices, strict=False))
    return (
        [tuple(get_part(value, *pair) for value in inputs) for pair in pairs],
        [{name: get_part(value, *pair) for name, value in kwargs.items()} for pair in pairs],
    )


def dict_gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of the copies, in the order of the copies.

    Tensors are concatenated along ``dim``; tensors without dimensions are stacked to
    ``(copies,)``. Dicts, lists and tuples are joined entry by entry, None stays None, and any
    other values (strings, numbers) are returned as a list with one value per copy.

    Raises:
        ValueError: the copies returned different keys, lengths, types or numbers of dimensions.
    """

    def leaf(tensors: list[Tensor]) -> Tensor:
        if len({tensor.ndim for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(f"copies returned tensors of different dimensions: shapes {shapes}")
        if not tensors[0].ndim:
            return torch.stack([tensor.to(device) for tensor in tensors])
        if device.type == "cuda" and all(tensor.is_cuda for tensor in tensors):
            gathered: Tensor = torch_gather(tensors, device, dim)
            return gathered
        return torch.cat([tensor.to(device) for tensor in tensors], dim)

    return join(outputs, leaf)


def join(
    outputs: Sequence[Any],
    leaf: Callable[[list[Tensor]], Tensor],
    other: Callable[[list[Any]], Any] = list,
) -> Any:
    """Join nested ``outputs``: corresponding tensors by ``leaf``, other values by ``other``.

    Raises:
        ValueError: the copies returned different keys, lengths or types.
    """
    if not outputs:
        raise ValueError("outputs must contain the output of at least one copy, got none")
    head = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return leaf(list(outputs))
    if any(type(output) is not type(head) for output in outputs):
        raise ValueError(
            "copies returned different types: "
            f"{_listed(outputs, lambda output: type(output).__name__)}"
        )
    if head is None:
        return None
    if isinstance(head, Mapping):
        if any(output.keys() != head.keys() for output in outputs):
            raise ValueError(f"copies returned different keys: {_listed(outputs, list)}")
        entries = {key: join([output[key] for output in outputs], leaf, other) for key in head}
        if not isinstance(head, dict):
            return entries
        # A copy, because some dict classes, such as defaultdict, cannot be called with items.
        joined = copy.copy(head)
        # Hugging Face's outputs override `update` to raise; this method sets each item.
        MutableMapping.update(joined, entries)
        return joined
    if isinstance(head, (list, tuple)):
        if any(len(output) != len(head) for output in outputs):
            raise ValueError(f"copies returned different lengths: {_listed(outputs, len)}")
        columns = [join(column, leaf, other) for column in zip(*outputs, strict=True)]
        kind: Any = type(head)
        return kind(*columns) if hasattr(head, "_fields") else kind(columns)
    return other(list(outputs))


def share_of_each(
    inputs: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    dim: int,
    are_samples: bool = False,
) -> list[float]:
    """Return each copy's share of the batch: its part of the samples, as a fraction of 1.

    The samples are counted in the first tensor with dimensions among the arguments of a copy; if a
    copy has none, all shares are equal. With ``are_samples``, the length of the first argument
    counts (``scatter_samples``).
    """
    equal = [1 / len(inputs)] * len(inputs)
    sizes = []
    for arguments in zip(inputs, kwargs, strict=True):
        if are_samples:
            sizes.append(len(next(iter((*arguments[0], *arguments[1].values())))))
            continue
        tensor = next((tensor for _, tensor in _tensors(arguments) if tensor.ndim), None)
        if tensor is None:
            return equal
        sizes.append(tensor.shape[dim])
    total = sum(sizes)
    return [size / total for size in sizes] if total else equal


def _count(tensors: Sequence[tuple[str, Tensor]], devices: int, dim: int) -> int:
    """Return the number of chunks, which must be the same for all tensors of a batch."""
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
        description = ", ".join(
            f"{tensor_text} into {count} chunks" for count, tensor_text in counts.items()
        )
        raise ValueError(
            f"all tensors must be split into the same number of chunks, but over {devices} devices "
            f"along dim={dim} the split is {description}; pass values that must not be split as "
            "another type than a tensor"
        )
    return next(iter(counts), devices)


def _tensors(data: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested ``data``, with its path for messages."""
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
        # Copies to all devices at the same time, on streams in the background.
        return list(torch_scatter(tensor, devices, dim))
    chunks = tensor.chunk(len(devices), dim)
    return [chunk.to(device) for chunk, device in zip(chunks, devices, strict=True)]


def _listed(outputs: Sequence[Any], describe: Callable[[Any], Any]) -> str:
    """Describe the output of every copy, for a message."""
    return ", ".join(f"copy {copy_id} {describe(output)}" for copy_id, output in enumerate(outputs))
