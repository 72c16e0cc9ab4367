"""Sharded tensors in checkpoints: every rank writes and reads only its parts.

The parts are in separate files, and a table in JSON lists them. Torch's distributed checkpoint is
not used, because it pickles its table, and unpickling can run arbitrary code.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...wrappers.layout import get_layout, is_dtensor, local_part
from .files import CheckpointError, find_damage, read_tensors, read_text, reading

TABLE = "shards.json"
# The files, without their suffix, that may have sharded tensors.
SHARDED = ("model", "optim", "state")
# A dict with this key replaces a sharded tensor in a tree.
_MARK = "stepwrap.sharded"
# Tensors that are not sharded and have at most this number of elements are read immediately.
_SMALL = 1024

# By file and tensor: shape and dtype of the tensor, offsets and sizes of one rank's part.
Places: TypeAlias = dict[
    str, dict[str, tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]]
]
Table: TypeAlias = dict[str, dict[str, dict[str, Any]]]


class ShardedContents:
    """One rank's contents of a checkpoint: nested containers, and its parts of sharded tensors.

    Attributes:
        trees: by file, the containers, in which a marker replaces each sharded tensor.
        places: by file, where the parts belong.
    """

    def __init__(self, contents: Mapping[str, Any]) -> None:
        self._parts: dict[str, dict[str, Tensor]] = {}
        self.places: Places = {}
        self.trees: dict[str, Any] = {}
        for stem, content in contents.items():
            self._parts[stem], self.places[stem] = {}, {}
            self.trees[stem] = _map_tree(content, partial(self._mark, stem))

    def get_files(self, rank: int, table: Table) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield names and contents of the files that ``table`` assigns to this rank."""
        for stem, stored in self._parts.items():
            name = _shard_file(stem, rank)
            file_tensors = {
                key: _compact(stored[key])
                for key, entry in table.get(stem, {}).items()
                if any(chunk["file"] == name for chunk in entry["pieces"])
            }
            if file_tensors:
                yield name, file_tensors

    def _mark(self, stem: str, tensor: Any, key: str) -> Any:
        if not is_dtensor(tensor):
            return tensor
        layout, local = get_layout(tensor), local_part(tensor)
        if not layout.sharded_over:
            return local
        if key in self._parts[stem]:
            raise ValueError(f"two tensors of {stem} have the name {key}")
        self._parts[stem][key] = local
        dtype = str(local.dtype).removeprefix("torch.")
        self.places[stem][key] = (layout.shape, dtype, layout.offsets, layout.sizes)
        return {_MARK: key}


def make_table(rank_locations: Sequence[Places]) -> Table:
    """Return the table of all parts; the first rank that holds a part writes it.

    Args:
        rank_locations: the parts that each rank holds.

    Raises:
        CheckpointError: the parts of a tensor do not make up the whole tensor.
    """
    table: Table = {}
    for rank, stems in enumerate(rank_locations):
        for stem, tensors in stems.items():
            for key, (shape, dtype, offsets, sizes) in tensors.items():
                initial = {"shape": list(shape), "dtype": dtype, "pieces": []}
                chunks = table.setdefault(stem, {}).setdefault(key, initial)["pieces"]
                is_listed = any(chunk["offsets"] == list(offsets) for chunk in chunks)
                if math.prod(sizes) and not is_listed:
                    chunk = {"offsets": list(offsets), "sizes": list(sizes)}
                    chunks.append({"file": _shard_file(stem, rank), **chunk})
    for stem, entries in table.items():
        for key, entry in entries.items():
            num_elements = sum(math.prod(chunk["sizes"]) for chunk in entry["pieces"])
            if num_elements != math.prod(entry["shape"]):
                raise CheckpointError(
                    f"the ranks hold {num_elements} of the {math.prod(entry['shape'])} elements of "
                    f"{key} in {stem}"
                )
    return table


def _shard_file(stem: str, rank: int) -> str:
    return f"{stem}.shard_{rank:05d}.pt"


class SavedTensor:
    """A saved tensor; ``saved[slices]`` and ``saved[...]`` read a part or all of it from files."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        chunks: Sequence[tuple[Sequence[int], Sequence[int], Callable[[], Tensor]]],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._pieces = chunks

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part into new memory; ``index`` is ``...`` or one slice per dimension."""
        slices = [slice(None)] * len(self.shape) if index is ... else index
        bounds = [s.indices(size)[:2] for s, size in zip(slices, self.shape, strict=True)]
        starts, part_sizes = [low for low, _ in bounds], [high - low for low, high in bounds]
        result = torch.empty(part_sizes, dtype=self.dtype)
        for offsets, sizes, load in self._pieces:
            common = overlap((starts, part_sizes), (offsets, sizes))
            if common is not None:
                result[common[0]] = load()[common[1]]
        return result


_Box: TypeAlias = tuple[Sequence[int], Sequence[int]]


def overlap(box: _Box, other: _Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two parts (offsets, sizes) of a tensor as slices of each, or None."""
    edges = list(zip(*box, *other, strict=True))
    common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
    if not all(low < high for low, high in common):
        return None
    inside_one, inside_other = (
        tuple(slice(low - o, high - o) for (low, high), o in zip(common, offsets, strict=True))
        for offsets, _ in (box, other)
    )
    return inside_one, inside_other


class Reader:
    """Read the files of a checkpoint.

    With ``by_parts``, files are memory-mapped and tensors are read when they are indexed.
    Otherwise each file is read as a whole.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any], *, by_parts: bool) -> None:
        self._folder = folder
        self._files = files
        self._by_parts = by_parts
        self._open: dict[str, Any] = {}
        self._table: Table = {}
        # The names of the files whose checksums need not be checked again.
        self.checked: set[str] = set()

    def check(self, *names: str) -> None:
        unchecked = {name: self._files[name] for name in names if name not in self.checked}
        damage = find_damage(self._folder, unchecked)
        if damage:
            raise CheckpointError(f"checkpoint {self._folder} is damaged: {damage}")

    def tree(self, stem: str) -> Any:
        """Return the content of a file; if ``by_parts``, larger tensors as ``SavedTensor``."""
        content = self.file(f"{stem}.pt")
        if not self._by_parts:
            return content
        if not self._table and TABLE in self._files:
            self.check(TABLE)
            with reading(self._folder, TABLE, "the table"):
                self._table = dict(json.loads(read_text(self._folder / TABLE)))
        with reading(self._folder, TABLE, stem):
            return _map_tree(content, partial(self._resolve, self._table.get(stem, {})))

    def file(self, name: str) -> Any:
        """Return a file's content; with ``by_parts``, callers must not change its tensors."""
        if name in self._open:
            return self._open[name]
        self.check(name)
        with reading(self._folder, name, "the content"):
            content = read_tensors(self._folder / name, mmap=self._by_parts)
        if self._by_parts:
            self._open[name] = content
        return content

    def _resolve(self, entries: Mapping[str, dict[str, Any]], value: Any, key: str) -> Any:
        if isinstance(value, Tensor):
            # Small tensors are copied at once.
            if value.numel() <= _SMALL:
                return value.clone()
            whole_place = ([0] * value.ndim, list(value.shape), lambda: value)
            return SavedTensor(value.shape, value.dtype, [whole_place])
        if isinstance(value, Mapping) and _MARK in value:
            return self._saved(value[_MARK], entries[value[_MARK]])
        return value

    def _saved(self, key: str, entry: Mapping[str, Any]) -> SavedTensor:
        chunks = []
        for chunk in entry["pieces"]:
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            chunks.append((offsets, sizes, partial(self._piece, key, chunk["file"])))
        return SavedTensor(torch.Size(entry["shape"]), getattr(torch, entry["dtype"]), chunks)

    def _piece(self, key: str, name: str) -> Tensor:
        tensors = self.file(name)
        with reading(self._folder, name, key):
            tensor: Tensor = tensors[key]
        return tensor


def load_whole_tensors(tree: Any) -> Any:
    """Return ``tree`` with each ``SavedTensor`` replaced by a whole tensor."""
    return _map_tree(tree, lambda value, _: value[...] if isinstance(value, SavedTensor) else value)


def _map_tree(value: Any, change: Callable[[Any, str], Any], key: str = "") -> Any:
    """Copy nested containers; ``change(item, path)`` returns the item or a replacement for it."""
    changed = change(value, key)
    if changed is not value:
        return changed
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping):
        kind: Any = type(value)
        copied = kind({k: _map_tree(v, change, f"{prefix}{k}") for k, v in value.items()})
        if isinstance(value, OrderedDict):
            # Torch stores the versions of the modules as an attribute of a state dict.
            vars(copied).update(vars(value))
        return copied
    if type(value) in (list, tuple):
        return type(value)(_map_tree(v, change, f"{prefix}{i}") for i, v in enumerate(value))
    return value


def _compact(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU in its own storage, since torch.save writes whole storages."""
    tensor = tensor.detach().cpu()
    is_compact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if is_compact else tensor.clone()
