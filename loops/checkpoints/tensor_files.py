"""Files of checkpoints in the format of safetensors, each written by one rank or by several.

The library safetensors writes whole tensors of one process. Here the ranks write their parts of
sharded tensors into one file, to the bytes that its header gives them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...wrappers.layout import get_layout, is_dtensor, local_part
from .files import CheckpointError, find_damage, open_synced, reading
from .saved_tensors import SMALL, SavedTensor
from .trees import Encoder, decode

SUFFIX = ".safetensors"
# Models above this size are divided into files of at most this size, as Hugging Face does.
MAX_BYTES = 5 * 2**30
# The entry in the metadata of a file, in JSON: the containers, and dtypes that safetensors lacks.
_ENTRY = "stepwrap"
_CODES = {
    getattr(torch, name): code
    for name, code in (
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
        *(("bool", "BOOL"), ("complex64", "C64")),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")),
    )
}

# By name of a sharded tensor: the offsets and sizes of one rank's part.
Parts: TypeAlias = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class TensorFile:
    """The content of a file.

    Attributes:
        name: the name of the file.
        tensors: by name; of sharded ones, this rank has a part.
        tree: the containers in JSON.
        aliases: further names of tensors, as ``safetensors.torch.save_model`` stores them.
    """

    name: str
    tensors: dict[str, Tensor]
    tree: Any = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.tensors.values()))

    @property
    def parts(self) -> Parts:
        """Where this rank's parts of sharded tensors belong."""
        layouts = {n: get_layout(t) for n, t in self.tensors.items() if is_dtensor(t)}
        return {name: (layout.offsets, layout.sizes) for name, layout in layouts.items()}

    def write(self, folder: Path) -> dict[str, Any] | None:
        """Write the file, with gaps for sharded tensors.

        Returns:
            Size and SHA-256; None if there are gaps.

        Raises:
            OSError: writing failed; it names the file.
        """
        digest, has_gaps = hashlib.sha256(), False
        with open_synced(folder / self.name, "wb") as file:
            for data in self._chunks():
                if isinstance(data, int):
                    has_gaps = True
                    file.seek(data, os.SEEK_CUR)
                else:
                    file.write(data)
                    digest.update(data)
            size = file.tell()
            file.truncate()
        return None if has_gaps else {"size": size, "sha256": digest.hexdigest()}

    def write_parts(self, folder: Path, names: Sequence[str]) -> None:
        """Write this rank's parts of the sharded tensors ``names`` into the file of rank 0."""
        if not names:
            return
        places = _read_places(folder / self.name)
        with open_synced(folder / self.name, "r+b") as file:
            for name in names:
                tensor, (offsets, sizes) = self.tensors[name], self.parts[name]
                memory = _memory(local_part(tensor))
                for start, stop, position in _runs(tensor.shape, offsets, sizes):
                    width = tensor.element_size()
                    file.seek(places[name] + position * width)
                    file.write(memory[start * width : stop * width])

    def _chunks(self) -> Iterator[Any]:
        """Yield the bytes of the file; for a sharded tensor, the number of its bytes."""
        order = sorted(self.tensors, key=lambda name: -self.tensors[name].element_size())
        header: dict[str, Any] = {"__metadata__": self._metadata()}
        end = 0
        for name in order:
            tensor, start = self.tensors[name], end
            end += _num_bytes(tensor)
            dtype, shape = _CODES.get(tensor.dtype), list(tensor.shape)
            if dtype is None:
                dtype, shape = "U8", [*shape, tensor.element_size()]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for name in order:
            tensor = self.tensors[name]
            yield _num_bytes(tensor) if is_dtensor(tensor) else _memory(tensor)

    def _metadata(self) -> dict[str, str]:
        dtypes = {
            name: str(tensor.dtype)
            for name, tensor in self.tensors.items()
            if tensor.dtype not in _CODES
        }
        entry = json.dumps({"tree": self.tree, "dtypes": dtypes}, separators=(",", ":"))
        return {**self.aliases, "format": "pt", _ENTRY: entry}


def pack(stem: str, content: Any) -> TensorFile:
    """Return nested containers as the content of a file.

    Raises:
        TypeError: they contain an object that cannot be saved.
    """
    encoder = Encoder(stem)
    tree = encoder.encode(content)
    return TensorFile(f"{stem}{SUFFIX}", encoder.tensors, tree, encoder.aliases)


def divide(file: TensorFile) -> list[TensorFile]:
    """Divide a file above ``MAX_BYTES`` into several, with Hugging Face's names."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in file.tensors.items():
        size += _num_bytes(tensor)
        if size > MAX_BYTES and groups[-1]:
            groups.append({})
            size = _num_bytes(tensor)
        groups[-1][name] = tensor
    if len(groups) == 1:
        return [file]
    stem = file.name.removesuffix(SUFFIX)
    names = [f"{stem}-{i:05d}-of-{len(groups):05d}{SUFFIX}" for i in range(1, len(groups) + 1)]
    files = [TensorFile(name, group) for name, group in zip(names, groups, strict=True)]
    files[0].tree, files[0].aliases = file.tree, file.aliases
    return files


def index_text(files: Sequence[TensorFile]) -> tuple[str, str] | None:
    """Return name and text of Hugging Face's index of a divided file; None if none is divided."""
    divided = [file for file in files if "-of-" in file.name]
    if not divided:
        return None
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in divided)},
        "weight_map": {name: file.name for file in divided for name in file.tensors},
    }
    return f"{stem_of(divided[0].name)}{SUFFIX}.index.json", json.dumps(index, indent=2)


def assign_parts(file: TensorFile, ranks: Sequence[Parts], rank: int) -> list[str]:
    """Return the sharded tensors whose part ``rank`` writes: the first rank that has a part does.

    Raises:
        CheckpointError: the parts do not make up the whole tensor.
    """
    assigned = []
    for name in file.parts:
        owners: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for other, parts in enumerate(ranks):
            if name in parts and all(parts[name][1]):
                owners.setdefault(parts[name], other)
        counts: list[int] = [math.prod(sizes) for _, sizes in owners]
        held = sum(counts)
        if held != file.tensors[name].numel():
            raise CheckpointError(
                f"the ranks hold {held} of the {file.tensors[name].numel()} elements of {name} in "
                f"{file.name}"
            )
        if rank in owners.values():
            assigned.append(name)
    return assigned


class Reader:
    """Read the files of a checkpoint.

    With ``by_parts``, files are mapped into memory, and tensors are read when they are indexed.
    """

    suffix = SUFFIX

    def __init__(self, folder: Path, files: Mapping[str, Any], *, by_parts: bool) -> None:
        self._folder = folder
        self._files = files
        self._by_parts = by_parts
        # The names of the files whose checksums need not be checked again.
        self.checked: set[str] = set()

    def check(self, *names: str) -> None:
        """Raise CheckpointError if a file is damaged."""
        unchecked = {name: self._files[name] for name in names if name not in self.checked}
        damage = find_damage(self._folder, unchecked)
        if damage:
            raise CheckpointError(f"checkpoint {self._folder} is damaged: {damage}")

    @property
    def stems(self) -> list[str]:
        """The names of the contents, such as "model" and "rank_00000"."""
        names = [name for name in self._files if name.endswith(self.suffix)]
        return [*dict.fromkeys(map(stem_of, names))]

    def tree(self, stem: str) -> Any:
        """Return the containers of ``stem``; if ``by_parts``, larger tensors as ``SavedTensor``."""
        return self._read(stem, by_parts=self._by_parts)

    def whole(self, stem: str) -> Any:
        """Return the containers of ``stem`` with whole tensors."""
        return self._read(stem, by_parts=False)

    def _read(self, stem: str, *, by_parts: bool) -> Any:
        names = [name for name in self._files if stem_of(name) == stem and name.endswith(SUFFIX)]
        self.check(*names)
        with reading(self._folder, f"{stem}{SUFFIX}", "the content"):
            files = [_OpenFile(self._folder / name, by_parts=by_parts) for name in names]
            owners = {name: file for file in files for name in file.names}
            loaded: dict[str, Any] = {}

            def load(name: str) -> Any:
                # Tied weights are one tensor.
                if name not in loaded:
                    loaded[name] = owners[name].load(name)
                return loaded[name]

            return decode(files[0].tree, load)


def read_file(path: Path) -> Any:
    """Return the containers in a file of a checkpoint; None if another program wrote the file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        if _ENTRY not in (file.metadata() or {}):
            return None
    opened = _OpenFile(path, by_parts=False)
    return decode(opened.tree, opened.load)


def stem_of(name: str) -> str:
    """Return the name of a file without its number and suffix, such as "model"."""
    return re.sub(r"(-\d+-of-\d+)?\..*", "", name)


class _OpenFile:
    def __init__(self, path: Path, *, by_parts: bool) -> None:
        from safetensors import safe_open

        # Mapped tensors would fail if the file is removed by another host.
        backend = "mmap" if by_parts else "pread"
        opened: Any = safe_open(path, framework="pt", backend=backend)
        self._file = opened
        self._by_parts = by_parts
        self.names = [*opened.keys()]
        entry = json.loads(opened.metadata()[_ENTRY])
        self.tree = entry["tree"]
        self._dtypes = {name: getattr(torch, d[6:]) for name, d in entry["dtypes"].items()}

    def load(self, name: str) -> Any:
        header = self._file.get_slice(name)
        shape = header.get_shape()
        dtype = self._dtypes.get(name)
        if dtype is not None:
            shape = shape[:-1]
        if not self._by_parts or math.prod(shape) <= SMALL:
            return self._get(name).clone() if self._by_parts else self._get(name)
        first = self._get(name)
        return SavedTensor(
            shape, first.dtype, [([0] * len(shape), shape, partial(self._get, name))]
        )

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        dtype = self._dtypes.get(name)
        return tensor if dtype is None else tensor.view(dtype).squeeze(-1)


class _Run(NamedTuple):
    """Elements ``start`` to ``stop`` of a part, which begin at ``position`` of the whole tensor."""

    start: int
    stop: int
    position: int


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[_Run]:
    """Yield the pieces of a part that are contiguous in the whole tensor."""
    if not math.prod(sizes):
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    last = cut[-1] if cut else 0
    length = math.prod(sizes[last:])
    rows = product(*(range(o, o + n) for o, n in zip(offsets[:last], sizes[:last], strict=True)))
    first = offsets[last] * strides[last] if shape else 0
    for number, row in enumerate(rows):
        position = first + sum(i * s for i, s in zip(row, strides, strict=False))
        yield _Run(number * length, (number + 1) * length, position)


def _read_places(path: Path) -> dict[str, int]:
    """Return the position in the file of each tensor's first byte."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {k: 8 + length + v["data_offsets"][0] for k, v in header.items() if k[:2] != "__"}


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its dimensions."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
