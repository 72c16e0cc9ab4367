"""Read the checkpoints of earlier releases, whose files were written by ``torch.save``.

A sharded tensor is in one file for each rank that has a part of it, and a table lists the parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import tensor_files
from .files import read_text, reading
from .saved_tensors import SMALL, SavedTensor, load_whole_tensors, map_tree

# The last format whose files are read here.
LAST = 2
_TABLE = "shards.json"
# A dict with this key replaces a sharded tensor in a tree.
_MARK = "stepwrap.sharded"

Table: TypeAlias = dict[str, dict[str, dict[str, Any]]]


class Reader(tensor_files.Reader):
    """Read the files of an old checkpoint."""

    suffix = ".pt"

    def _read(self, stem: str, keys: Sequence[str], *, by_parts: bool) -> Any:
        sharded = self._table.get(stem, {})
        tree = self._file(f"{stem}.pt", mmap=by_parts or bool(sharded))
        if by_parts or sharded:
            with reading(self._folder, _TABLE, stem):
                tree = map_tree(tree, partial(self._resolve, sharded))
        for key in keys:
            tree = tree[key]
        return tree if by_parts else load_whole_tensors(tree)

    @cached_property
    def _table(self) -> Table:
        if _TABLE not in self._files:
            return {}
        self.check(_TABLE)
        with reading(self._folder, _TABLE, "the table"):
            return dict(json.loads(read_text(self._folder / _TABLE)))

    def _file(self, name: str, *, mmap: bool) -> Any:
        """Return a file's content; if it is mapped, callers must not change its tensors."""
        if name in self._mapped:
            return self._mapped[name]
        self.check(name)
        with reading(self._folder, name, "the content"):
            content = read_tensors(self._folder / name, mmap=mmap)
        if mmap:
            self._mapped[name] = content
        return content

    @cached_property
    def _mapped(self) -> dict[str, Any]:
        return {}

    def _resolve(self, entries: Mapping[str, dict[str, Any]], value: Any, key: str) -> Any:
        if isinstance(value, Tensor):
            # Small tensors are copied at once.
            if value.numel() <= SMALL:
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
        tensors = self._file(name, mmap=True)
        with reading(self._folder, name, key):
            tensor: Tensor = tensors[key]
        return tensor


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` on the CPU; unpickle only tensors and plain containers."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        # Do not repeat torch's message: it advises weights_only=False.
        raise ValueError(
            "the file must be written by torch.save and contain only tensors, numbers, strings, "
            f"lists, tuples, sets and dicts ({type(error).__name__})"
        ) from error
