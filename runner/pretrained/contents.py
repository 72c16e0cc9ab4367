"""Sum up and compare the contents of checkpoints: nested containers of tensors and values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...loops.checkpoints.saved_tensors import SavedTensor
from ...primitives.tensor_bits import same_bits

# Tensors are converted to float64 in chunks of this number of elements.
_CHUNK = 1 << 22


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values in nested containers; empty containers are values."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, (list, tuple, deque)):
        entries = enumerate(value)
    is_empty = True
    for key, entry in entries:
        is_empty = False
        yield from leaves(entry, f"{path}.{key}" if path else str(key))
    if is_empty:
        yield path, value


def name_states(optim: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of optimizers with states under the names of their parameters.

    The numbers of the parameters depend on the order of the model and are left out. Files of
    earlier releases may lack the names; their content is returned unchanged.
    """
    groups = optim.get("param_groups")
    if not isinstance(groups, list):
        return {
            name: name_states(entry) if isinstance(entry, Mapping) else entry
            for name, entry in optim.items()
        }
    names: dict[int, str] = {}
    renamed: list[dict[str, Any]] = []
    for group in groups:
        if "param_names" not in group:
            return dict(optim)
        names |= zip(group["params"], group["param_names"], strict=True)
        settings = {key: value for key, value in group.items() if key != "params"}
        renamed.append({**settings, "param_names": sorted(group["param_names"])})
    states = {names.get(number, number): state for number, state in optim["state"].items()}
    return {**optim, "state": states, "param_groups": renamed}


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, which may not be read yet."""
    return isinstance(value, (Tensor, SavedTensor))


def region(value: Any) -> Any:
    """Return what is equal for tied weights only."""
    if isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def read_whole(value: Any) -> Any:
    """Return a value; read the tensor of a ``SavedTensor``."""
    return value[...] if isinstance(value, SavedTensor) else value


def _wide_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in float64 or complex128."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK].to(wide)


def num_bytes(value: Any) -> int:
    """Return the size of a tensor, which may not be read yet."""
    return int(math.prod(value.shape) * value.dtype.itemsize)


@dataclass
class Total:
    """The sum of the weights of a module, or one weight.

    Attributes:
        count: the number of elements.
        non_finite: the number of elements that are NaN or infinite.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtypes: dict[str, None] = field(default_factory=dict)
    tensors: int = 0
    count: int = 0
    bytes: int = 0
    norm: float = 0.0
    non_finite: int = 0
    tied_to: str = ""

    def note_dtype(self, value: Any) -> None:
        """Add the dtype of a tensor."""
        self.dtypes[str(value.dtype).removeprefix("torch.")] = None

    def add(self, value: Any) -> None:
        """Add a tensor."""
        self.note_dtype(value)
        self.tensors += 1
        self.count += math.prod(value.shape)
        self.bytes += num_bytes(value)
        for chunk in _wide_chunks(read_whole(value)):
            self.norm = math.hypot(self.norm, float(torch.linalg.vector_norm(chunk)))
            self.non_finite += int((~chunk.isfinite()).sum())

    def as_json(self) -> dict[str, Any]:
        """Return the values, with None for a norm that is not finite."""
        norm = self.norm if math.isfinite(self.norm) else None
        return {**vars(self), "dtypes": [*self.dtypes], "norm": norm}


def sum_up(weights: Mapping[str, Any], depth: int | None) -> list[Total]:
    """Return each weight, or the totals of modules; tied weights count once."""
    totals: dict[str, Total] = {}
    first_names: dict[Any, str] = {}
    for name, value in leaves(weights):
        if not is_tensor(value):
            continue
        title = name if depth is None else ".".join(name.split(".")[:depth])
        tied_to = first_names.setdefault(region(value), name)
        total = totals.setdefault(title, Total(title))
        if depth is None:
            total.shape = tuple(value.shape)
        if tied_to == name:
            total.add(value)
        elif depth is None:
            total.tied_to, total.norm = tied_to, totals[tied_to].norm
            total.note_dtype(value)
    return list(totals.values())


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        file: the content, such as "model".
        name: the path in it.
        text: the difference in words.
        largest: the largest absolute difference; None unless values of tensors were compared.
        relative: the norm of the difference, divided by the norm of the first tensor.
    """

    file: str
    name: str
    text: str
    largest: float | None = None
    relative: float | None = None


def differences(file: str, a: Any, b: Any) -> Iterator[Difference]:
    """Yield the differences between two contents, read one tensor at a time."""
    in_a, in_b = dict(leaves(a)), dict(leaves(b))
    for name in dict.fromkeys([*in_a, *in_b]):
        if name not in in_b or name not in in_a:
            yield Difference(file, name, "only in B" if name in in_b else "only in A")
        elif is_tensor(in_a[name]) and is_tensor(in_b[name]):
            difference = _tensor_difference(file, name, in_a[name], in_b[name])
            if difference is not None:
                yield difference
        elif not _same_value(in_a[name], in_b[name]):
            yield Difference(file, name, f"{short_text(in_a[name])} -> {short_text(in_b[name])}")


def _tensor_difference(file: str, name: str, a: Any, b: Any) -> Difference | None:
    if a.shape != b.shape:
        return Difference(file, name, f"shape {tuple(a.shape)} -> {tuple(b.shape)}")
    text = "" if a.dtype == b.dtype else f"dtype {a.dtype} -> {b.dtype}".replace("torch.", "")
    tensor, other = read_whole(a), read_whole(b)
    is_dense = tensor.layout is other.layout is torch.strided
    plain = is_dense and not (tensor.is_quantized or other.is_quantized)
    if plain and same_bits(tensor, other):
        return None
    largest, total, norm, count = 0.0, 0.0, 0.0, 0
    for chunk, other_chunk in zip(_wide_chunks(tensor), _wide_chunks(other), strict=True):
        equal = (chunk == other_chunk) | (chunk.isnan() & other_chunk.isnan())
        # The difference of equal infinities would be NaN.
        change = torch.where(equal, 0, other_chunk - chunk)
        count += int((~equal).sum())
        # `max` of Python would lose a NaN.
        top = float(change.abs().max())
        largest = top if math.isnan(top) or top > largest else largest
        total = math.hypot(total, float(torch.linalg.vector_norm(change)))
        norm = math.hypot(norm, float(torch.linalg.vector_norm(chunk[chunk.isfinite()])))
    if not plain and not count and not text:
        return None
    relative = total / norm if norm else math.inf if total else 0.0
    # 0.0 and -0.0, or integers that float64 lacks, have other bits.
    number = f"{count:,} of {tensor.numel():,} elements" if count else "equal numbers, other bits"
    return Difference(file, name, f"{text}, {number}" if text else number, largest, relative)


def _same_value(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    # Unlike ==, this finds 0.0 and -0.0 different and NaN equal.
    return bool(isinstance(a, (set, frozenset)) and a == b) or repr(a) == repr(b)


def short_text(value: Any) -> str:
    """Return the value on one line of at most 60 characters."""
    if is_tensor(value):
        return f"tensor {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
