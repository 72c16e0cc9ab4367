"""Convert nested containers to JSON and tensors, and back; no class is imported by its name."""

from __future__ import annotations

import base64
import sys
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from ...wrappers.layout import is_dtensor, is_sharded, local_part

_PLAIN = (str, bool, int, float, type(None))
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
# An object in JSON whose first key is a tag stands for a value that JSON lacks. It may have a
# second entry.
_TENSOR = "$tensor"
# The name of a tensor with the JSON of its file.
TREE = "stepwrap.tree"
_EXTRA = "extra"


def _ordered(entries: Any, versions: Any = None) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(entries)
    if versions is not None:
        # torch keeps the versions of modules in an attribute of a state dict.
        vars(ordered)["_metadata"] = OrderedDict(versions)
    return ordered


def _dtype(text: str) -> torch.dtype:
    # Not getattr(), which may import modules of torch.
    dtype = vars(torch).get(text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text} is not a dtype of torch {torch.__version__}")
    return dtype


# By tag: a type, a function that returns what to save of a value, and one that restores it.
_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[..., Any]]] = {
    "$tuple": (tuple, list, tuple),
    "$set": (set, list, set),
    "$frozenset": (frozenset, list, frozenset),
    "$size": (torch.Size, list, torch.Size),
    "$deque": (deque, list, deque),
    "$counter": (Counter, dict, Counter),
    "$ordered": (OrderedDict, dict, _ordered),
    # JSON in Python has at most 4,300 digits.
    "$int": (int, hex, lambda text: int(text, 16)),
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$complex": (complex, lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    "$range": (range, lambda v: [v.start, v.stop, v.step], lambda limits: range(*limits)),
    "$dtype": (torch.dtype, str, _dtype),
    "$device": (torch.device, str, torch.device),
    "$datetime": (
        datetime,
        datetime.isoformat,
        lambda text, fold: datetime.fromisoformat(text).replace(fold=fold),
    ),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (
        time,
        time.isoformat,
        lambda text, fold: time.fromisoformat(text).replace(fold=fold),
    ),
    "$timedelta": (
        timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda numbers: timedelta(*numbers),
    ),
    "$path": (type(Path()), str, Path),
    "$posix_path": (PurePosixPath, str, PurePosixPath),
    "$windows_path": (PureWindowsPath, str, PureWindowsPath),
}
# By tag: the attribute with the second argument of the function that restores the value.
_ATTRIBUTES = {
    "$deque": "maxlen",
    "$ordered": "_metadata",
    "$datetime": "fold",
    "$time": "fold",
}
# Arrays of at most this number of bytes are in the JSON, since there may be many of them.
_SMALL_BYTES = 256
_TAGS = {kind: tag for tag, (kind, _, _) in _TYPES.items()}


class Encoder:
    """Convert nested containers to JSON, and collect their tensors.

    Attributes:
        tensors: by their path in the containers.
        aliases: by path, the path of an earlier tensor with the same memory, which is collected.
    """

    def __init__(self, title: str) -> None:
        """Take the title of the outermost container, for errors."""
        self._title = title
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._paths: dict[Any, str] = {}

    def encode(self, value: Any, path: str = "") -> Any:
        """Return ``value`` as JSON.

        Raises:
            TypeError: it contains an object that cannot be saved.
        """
        kind = type(value)
        if kind in _PLAIN and not (kind is int and value.bit_length() > 4096):
            return value
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        tag, content = _content(value)
        if tag is not None:
            encoded = {tag: self.encode(content, path)}
            extra = getattr(value, _ATTRIBUTES.get(tag, ""), None)
            return encoded if extra is None else {**encoded, _EXTRA: self.encode(extra, path)}
        if isinstance(value, (list, Mapping)):
            return self._encode_container(value, f"{path}." if path else "")
        for number in (int, float):
            if isinstance(value, number):
                return number(value)
        raise TypeError(
            "a checkpoint can contain only tensors, NumPy arrays, numbers, strings, bytes, lists, "
            "tuples, sets, deques, dicts, members of enums, paths, and times with a fixed offset "
            f"from UTC, got a {kind.__module__}.{kind.__qualname__} in {self._full(path)}; "
            "convert it in state_dict()"
        )

    def _encode_container(self, value: Any, prefix: str) -> Any:
        if not isinstance(value, Mapping):
            return [self.encode(entry, f"{prefix}{i}") for i, entry in enumerate(value)]
        entries = {key: self.encode(entry, f"{prefix}{key}") for key, entry in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in entries):
            return entries
        keys = [self.encode(key, f"{prefix}key") for key in entries]
        return {"$dict": [list(pair) for pair in zip(keys, entries.values(), strict=True)]}

    def _full(self, path: str) -> str:
        return f"{self._title}.{path}" if path else self._title

    def _encode_tensor(self, tensor: Tensor, path: str) -> Any:
        if is_dtensor(tensor):
            if is_sharded(tensor):
                return {_TENSOR: self._add(tensor.detach(), path)}
            tensor = local_part(tensor)
        if type(tensor) not in _TENSORS:
            raise TypeError(
                f"a checkpoint can contain only plain tensors, got a {type(tensor).__module__}."
                f"{type(tensor).__qualname__} in {self._full(path)}; convert it in state_dict()"
            )
        tensor = tensor.detach()
        if tensor.is_meta:
            raise TypeError(f"{self._full(path)} is on the meta device and has no data to save")
        if tensor.is_quantized:
            return {"$quantized": self.encode(_quantized_content(tensor), path)}
        if tensor.layout is not torch.strided:
            return {"$sparse": self.encode(_sparse_content(tensor), path)}
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        # An empty tensor shares its memory with none.
        memory: Any = (tensor.device, tensor.data_ptr(), *layout) if tensor.numel() else object()
        if memory in self._paths:
            self.aliases[path] = self._paths[memory]
        else:
            self._paths[memory] = self._add(tensor, path)
        reference: dict[str, Any] = {_TENSOR: self._paths[memory]}
        if not tensor.is_contiguous() and _is_dense(tensor):
            reference["strides"] = list(tensor.stride())
        return reference

    def _add(self, tensor: Tensor, path: str) -> str:
        # Names in a file are UTF-8. The path "a.b" may be a key, or the entry "b" of "a".
        name = path = path.encode(errors="backslashreplace").decode()
        number = 2
        while name in self.tensors or name in ("__metadata__", TREE):
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = tensor
        return name


def _content(value: Any) -> tuple[str | None, Any]:
    """Return the tag of a value and what to save of it; None for values without a tag."""
    kind = type(value)
    if isinstance(value, (OrderedDict, Counter)):
        kind = OrderedDict if isinstance(value, OrderedDict) else Counter
    if kind in _TAGS:
        zone = getattr(value, "tzinfo", None)
        is_fixed = zone is None or type(zone) is timezone
        return (_TAGS[kind], _TYPES[_TAGS[kind]][1](value)) if is_fixed else (None, None)
    if isinstance(value, Enum):
        member = [kind.__module__, kind.__qualname__, value.value]
        return ("$enum", member) if _is_importable(value, *member) else (None, None)
    if kind.__module__ == "numpy" and (array := _array_content(value)) is not None:
        return "$numpy", array
    return None, None


def _is_importable(member: Enum, *content: Any) -> bool:
    try:
        return _enum_member(*content) is member
    except (ValueError, TypeError):
        return False


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory, in any order of the dimensions."""
    size_so_far = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != size_so_far:
            return False
        size_so_far *= size
    return True


def decode(value: Any, load: Callable[[str, tuple[int, ...] | None], Any]) -> Any:
    """Return the containers of JSON.

    Args:
        value: the result of ``Encoder.encode``.
        load: returns a tensor by its path and strides, or an object with ``dtype`` whose ``[...]``
            is the whole tensor.

    Raises:
        ValueError: the JSON has a tag or a class that is unknown here.
    """
    if isinstance(value, list):
        return [decode(entry, load) for entry in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag == _TENSOR:
        strides = value.get("strides")
        return load(value[_TENSOR], None if strides is None else tuple(strides))
    if not tag.startswith("$"):
        return {key: decode(entry, load) for key, entry in value.items()}
    content = decode(value[tag], load)
    if tag in _TYPES:
        extra = (decode(value[_EXTRA], load),) if _EXTRA in value else ()
        return _TYPES[tag][2](content, *extra)
    if tag in _FAMILIES:
        return _FAMILIES[tag](*(_whole(entry) for entry in content))
    raise ValueError(f"{tag} is unknown: the file is from a later version")


def _whole(saved: Any) -> Any:
    is_lazy = hasattr(saved, "dtype") and not isinstance(saved, Tensor)
    return saved[...] if is_lazy else saved


def _enum_member(module: str, name: str, value: Any) -> Enum:
    kind: Any = sys.modules.get(module)
    for attribute in name.split("."):
        # Not getattr(), which may import modules.
        kind = vars(kind).get(attribute) if hasattr(kind, "__dict__") else None
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise ValueError(f"the enum {module}.{name} is not imported; import {module} first")
    return kind(value)


def _array_content(value: Any) -> list[Any] | None:
    """Return dtype, shape, whether it is a scalar, and bytes; None if they do not describe it."""
    import numpy as np

    is_scalar = isinstance(value, np.generic)
    if not (is_scalar or type(value) is np.ndarray) or value.dtype.hasobject:
        return None
    with warnings.catch_warnings():
        # It proposes a pickle for dtypes with metadata.
        warnings.simplefilter("ignore")
        dtype = np.lib.format.dtype_to_descr(value.dtype)
    if np.lib.format.descr_to_dtype(dtype) != value.dtype:
        return None
    # As bytes, because torch lacks many of the dtypes.
    data: Any = value.tobytes()
    if len(data) > _SMALL_BYTES:
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [dtype, list(value.shape), is_scalar, data]


def _array(descr: Any, shape: list[int], is_scalar: bool, data: Any) -> Any:
    import numpy as np

    dtype = np.lib.format.descr_to_dtype(descr)
    array = np.zeros(shape, dtype)
    if dtype.itemsize and array.size:
        content = data if isinstance(data, bytes) else data.numpy().tobytes()
        array = np.frombuffer(content, dtype).reshape(shape).copy()
    return array[()] if is_scalar else array


def _sparse_content(tensor: Tensor) -> list[Any]:
    if tensor.layout is torch.sparse_coo:
        tensors = [tensor._indices(), tensor._values(), tensor.is_coalesced()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        tensors = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        tensors = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [str(tensor.layout), tensor.shape, *tensors]


def _sparse(layout: str, shape: torch.Size, a: Tensor, b: Tensor, c: Any) -> Tensor:
    if layout == "torch.sparse_coo":
        return torch.sparse_coo_tensor(a, b, shape, is_coalesced=c, check_invariants=True)
    kind = getattr(torch, layout.removeprefix("torch."))
    return torch.sparse_compressed_tensor(a, b, c, shape, layout=kind, check_invariants=True)


def _quantized_content(tensor: Tensor) -> list[Any]:
    integers, dtype = tensor.int_repr(), tensor.dtype
    if tensor.qscheme() == torch.per_tensor_affine:
        return [dtype, integers, tensor.q_scale(), tensor.q_zero_point(), None]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [dtype, integers, scales, zeros, tensor.q_per_channel_axis()]


def _quantized(dtype: torch.dtype, integers: Tensor, scale: Any, zero: Any, axis: Any) -> Tensor:
    # torch has no public function for integers, and rounds other numbers.
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(integers, scale, zero)
    return torch._make_per_channel_quantized_tensor(integers, scale, zero, axis)


_FAMILIES: dict[str, Callable[..., Any]] = {
    "$dict": lambda *pairs: dict(pairs),
    "$enum": _enum_member,
    "$numpy": _array,
    "$sparse": _sparse,
    "$quantized": _quantized,
}
