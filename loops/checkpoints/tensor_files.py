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
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...wrappers.layout import get_layout, is_dtensor, local_part
from .files import CheckpointError, find_damage, open_synced, reading
from .saved_tensors import SMALL, SavedTensor
from .trees import TREE, Encoder, decode

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

# The header of a file, which safetensors reads up to this size; JSON above the second size is in a
# separate tensor.
_MAX_HEADER_BYTES, _MAX_ENTRY_BYTES = 100_000_000, 2**20
# Tensors are copied, hashed and written in chunks of this size.
_CHUNK_BYTES = 2**22


class LocalShard(NamedTuple):
    """One rank's part of a sharded tensor."""

    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


LocalShards: TypeAlias = dict[str, LocalShard]


@dataclass
class TensorFile:
    """The content of a file.

    Attributes:
        name: the name of the file.
        tensors: by name; of sharded ones, this rank's parts.
        shards: the positions of the parts in their tensors, by name.
        tree: the containers in JSON.
        aliases: further names of tensors, as ``safetensors.torch.save_model`` stores them.
    """

    name: str
    tensors: dict[str, Tensor]
    shards: LocalShards = field(default_factory=dict)
    tree: Any = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors, as a whole."""
        return sum(map(self.tensor_bytes, self.tensors))

    def tensor_bytes(self, name: str) -> int:
        """Return the bytes of a tensor, as a whole."""
        return math.prod(self._shape(name)) * self.tensors[name].element_size()

    def _shape(self, name: str) -> Sequence[int]:
        return self.shards[name].shape if name in self.shards else self.tensors[name].shape

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position in the file of each sharded tensor's first byte, by name."""
        _, starts = self._header()
        return {name: starts[name] for name in self.shards}

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
                    continue
                for start in range(0, len(data), _CHUNK_BYTES):
                    # A copy, because another thread may change the tensor meanwhile.
                    chunk = bytes(data[start : start + _CHUNK_BYTES])
                    file.write(chunk)
                    digest.update(chunk)
            size = file.tell()
            file.truncate()
        return None if has_gaps else {"size": size, "sha256": digest.hexdigest()}

    def write_shards(
        self, folder: Path, names: Sequence[str], positions: Mapping[str, int]
    ) -> None:
        """Write this rank's parts of the sharded tensors ``names`` into the file of rank 0.

        Args:
            folder: the folder of the file.
            names: the tensors.
            positions: the ``positions`` of rank 0.
        """
        if not names:
            return
        # Not opened for reading: a network file system would read whole pages, and write them back
        # over the parts of ranks on other hosts.
        with open_synced(folder / self.name, "wb", opener=_open_existing) as file:
            for name in names:
                tensor, shard = self.tensors[name], self.shards[name]
                memory, width = _memory(tensor), tensor.element_size()
                for start, stop, position in _runs(shard.shape, shard.offsets, shard.sizes):
                    file.seek(positions[name] + position * width)
                    file.write(memory[start * width : stop * width])

    def _chunks(self) -> Iterator[Any]:
        """Yield the bytes of the file; for a sharded tensor, the number of its bytes."""
        header, starts = self._header()
        yield header
        for name in starts:
            if name == TREE:
                yield self._entry
                continue
            yield self.tensor_bytes(name) if name in self.shards else _memory(self.tensors[name])

    def _header(self) -> tuple[bytes, dict[str, int]]:
        """Return the bytes of the header, and the position of each tensor in the file, in order."""
        order = sorted(self.tensors, key=lambda name: -self.tensors[name].element_size())
        header: dict[str, Any] = {"__metadata__": self._metadata()}
        end, starts = 0, {}
        for name in order:
            tensor = self.tensors[name]
            starts[name], end = end, end + self.tensor_bytes(name)
            dtype, shape = _CODES.get(tensor.dtype), list(self._shape(name))
            if dtype is None:
                dtype, shape = "U8", [*shape, tensor.element_size()]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
        if len(self._entry) > _MAX_ENTRY_BYTES:
            starts[TREE], size = end, len(self._entry)
            header[TREE] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # Tensors that are mapped into memory begin at multiples of 64 bytes.
        text += b" " * (-(8 + len(text)) % 64)
        if len(text) > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.name} would have {len(self.tensors)} tensors, and a header of "
                f"{len(text) / 1e6:.3g} MB; safetensors reads up to {_MAX_HEADER_BYTES / 1e6:.3g} "
                "MB: keep fewer and larger tensors in the states"
            )
        data = len(text).to_bytes(8, "little") + text
        return data, {name: len(data) + start for name, start in starts.items()}

    @cached_property
    def _entry(self) -> bytes:
        dtypes = {
            name: str(tensor.dtype)
            for name, tensor in self.tensors.items()
            if tensor.dtype not in _CODES
        }
        entry = {"content": get_stem(self.name), "tree": self.tree, "dtypes": dtypes}
        return json.dumps(entry, separators=(",", ":")).encode()

    def _metadata(self) -> dict[str, str]:
        is_large = len(self._entry) > _MAX_ENTRY_BYTES
        entry = TREE if is_large else self._entry.decode()
        return {**self.aliases, "format": "pt", _ENTRY: entry}


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, os.O_WRONLY)


def pack(stem: str, content: Any) -> TensorFile:
    """Return nested containers as the content of a file.

    Raises:
        TypeError: they contain an object that cannot be saved.
    """
    encoder = Encoder(stem)
    try:
        tree = encoder.encode(content)
    except RecursionError:
        text = f"{stem}: containers contain themselves, or are nested too deeply"
        raise TypeError(text) from None
    tensors = {name: local_part(tensor) for name, tensor in encoder.tensors.items()}
    shards = {name: _shard(t) for name, t in encoder.tensors.items() if is_dtensor(t)}
    return TensorFile(f"{stem}{SUFFIX}", tensors, shards, tree, encoder.aliases)


def _shard(tensor: Tensor) -> LocalShard:
    layout = get_layout(tensor)
    return LocalShard(layout.shape, str(tensor.dtype), layout.offsets, layout.sizes)


def divide(file: TensorFile) -> list[TensorFile]:
    """Divide a file above ``MAX_BYTES`` into several, with Hugging Face's names."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in file.tensors.items():
        size += file.tensor_bytes(name)
        if size > MAX_BYTES and groups[-1]:
            groups.append({})
            size = file.tensor_bytes(name)
        groups[-1][name] = tensor
    if len(groups) == 1:
        return [file]
    stem, files = file.name.removesuffix(SUFFIX), []
    for number, group in enumerate(groups, 1):
        shards = {name: file.shards[name] for name in group if name in file.shards}
        name = f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        files.append(TensorFile(name, group, shards))
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
    return f"{get_stem(divided[0].name)}{SUFFIX}.index.json", json.dumps(index, indent=2)


def assign_shards(file: TensorFile, ranks: Sequence[LocalShards], rank: int) -> list[str]:
    """Return the sharded tensors whose part ``rank`` writes: the first rank that has a part does.

    Raises:
        CheckpointError: the parts do not make up the whole tensor.
    """
    assigned = []
    for name, local in file.shards.items():
        owners: dict[LocalShard, int] = {}
        for other, shards in enumerate(ranks):
            if name in shards and all(shards[name].sizes):
                owners.setdefault(shards[name], other)
        counts: list[int] = [math.prod(shard.sizes) for shard in owners]
        if sum(counts) != math.prod(local.shape):
            raise CheckpointError(
                f"the ranks hold {sum(counts)} of the {math.prod(local.shape)} elements of {name} "
                f"in {file.name}"
            )
        if any(shard[:2] != local[:2] for shard in owners):
            kinds = "; ".join(sorted({f"{shard.dtype} of shape {shard.shape}" for shard in owners}))
            raise CheckpointError(f"{name} in {file.name} differs between ranks: {kinds}")
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
        return [*dict.fromkeys(map(get_stem, names))]

    def tree(self, stem: str, *keys: str) -> Any:
        """Return the containers of ``stem``; if ``by_parts``, larger tensors as ``SavedTensor``.

        Args:
            stem: one of ``stems``.
            keys: keys of the entry to return; nothing else is read.
        """
        return self._read(stem, keys, by_parts=self._by_parts)

    def whole(self, stem: str) -> Any:
        """Return the containers of ``stem`` with whole tensors."""
        return self._read(stem, (), by_parts=False)

    def _read(self, stem: str, keys: Sequence[str], *, by_parts: bool) -> Any:
        names = [name for name in self._files if get_stem(name) == stem and name.endswith(SUFFIX)]
        self.check(*names)
        with reading(self._folder, names[0], "the content"):
            files = [_OpenFile(self._folder / name, by_parts=by_parts) for name in names]
            owners = {name: file for file in files for name in file.names}
            tree = files[0].tree
            for key in keys:
                tree = _entries(tree)[key]
            return decode(tree, cache(lambda name, strides: owners[name].load(name, strides)))


def _entries(tree: Any) -> Any:
    """Return the entries of a dict or OrderedDict in JSON."""
    return tree.get("$ordered", tree)


def read_file(path: Path, *, by_parts: bool = False) -> Any:
    """Return the weights in a file of a checkpoint; None if another program wrote the file.

    Of a divided model, these are the weights in this file.

    Raises:
        ValueError: the file contains other things than weights.
    """
    opened = _OpenFile(path, by_parts=by_parts)
    if opened.content is None:
        return None
    if opened.content != "model":
        raise ValueError(f"it contains {opened.content}, and the weights are in model{SUFFIX}")
    tree = _entries(opened.tree or {})
    if "-of-" in path.name:
        names = {name: {"$tensor": name} for name in opened.names}
        entries = {k: v for k, v in tree.items() if set(_names_in(v)) <= names.keys()}
        return decode({**entries, **names}, cache(opened.load))
    return decode(opened.tree, cache(opened.load))


def _names_in(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors in JSON."""
    if isinstance(tree, dict) and "$tensor" in tree:
        yield tree["$tensor"]
    elif isinstance(tree, (dict, list)):
        for entry in tree.values() if isinstance(tree, dict) else tree:
            yield from _names_in(entry)


def get_stem(name: str) -> str:
    """Return the name of a file without its number and suffix, such as "model"."""
    return re.sub(r"(-\d+-of-\d+)?\..*", "", name)


class _OpenFile:
    """A file that is read tensor by tensor.

    Attributes:
        names: the names of the tensors.
        content: the name of the content, such as "model"; None if another program wrote the file.
    """

    def __init__(self, path: Path, *, by_parts: bool) -> None:
        from safetensors import safe_open

        # Mapped tensors would fail if another host removes the file.
        opened: Any = safe_open(path, framework="pt", backend="mmap" if by_parts else "pread")
        self._file = opened
        self._by_parts = by_parts
        names: list[str] = opened.keys()
        self.names = [name for name in names if name != TREE]
        text = (opened.metadata() or {}).get(_ENTRY, "null")
        if text == TREE:
            text = bytes(opened.get_tensor(TREE).numpy())
        entry = json.loads(text)
        if not isinstance(entry, dict):
            entry = {}
        self.content: str | None = entry.get("content")
        self._tree = entry.get("tree")
        self._dtypes = {name: vars(torch)[d[6:]] for name, d in entry.get("dtypes", {}).items()}

    @property
    def tree(self) -> Any:
        if self.content is None:
            raise ValueError("another program wrote it")
        return self._tree

    def load(self, name: str, strides: tuple[int, ...] | None = None) -> Any:
        shape = self._file.get_slice(name).get_shape()
        if name in self._dtypes:
            shape = shape[:-1]
        if self._by_parts and math.prod(shape) > SMALL:
            dtype, chunks = (
                self._get(name).dtype,
                [([0] * len(shape), shape, partial(self._get, name))],
            )
            return SavedTensor(shape, dtype, chunks)
        tensor = self._get(name)
        if strides is not None:
            restrided = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
            return restrided.copy_(tensor)
        return tensor.clone() if self._by_parts else tensor

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
    """Yield the chunks of a part that are contiguous in the whole tensor."""
    if not math.prod(sizes):
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    split_dims = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    # The run has all of the later dimensions.
    inner = split_dims[-1] if split_dims else 0
    length = math.prod(sizes[inner:])
    ranges = zip(offsets[:inner], sizes[:inner], strict=True)
    start = offsets[inner] * strides[inner] if shape else 0
    for number, row in enumerate(product(*(range(low, low + size) for low, size in ranges))):
        position = start + sum(i * stride for i, stride in zip(row, strides, strict=False))
        yield _Run(number * length, (number + 1) * length, position)


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its dimensions."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
