"""Write, read and compare the ledgers of runs.

docs/exactness.md has the format, byte by byte.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MAGIC = b"\x93STEPWRAP-LEDGER"
_VERSION = 1
_START, _LAYOUT, _ENTRY = 1, 2, 3
_HEAD = struct.Struct("<BI")
_CHECK = struct.Struct("<I")
# The version, whether the ledger is full, the rank, the number of ranks, the step.
_START_FIELDS = struct.Struct("<IIIIQ")
# The number of the layout, and the step.
_ENTRY_FIELDS = struct.Struct("<IQ")


class LedgerError(ValueError):
    """A ledger is missing or of a later format, or two of them cannot be compared."""


class Item(NamedTuple):
    """The key of one hash in an entry.

    Attributes:
        stage: "data", "random state", "forward", "gradient" or "update".
        name: the name of a part of the batch, a stream, a log value, a module, a parameter or a
            parameter group.
    """

    stage: str
    name: str


Entry = dict[Item, int]


class LedgerWriter:
    """Append entries to a rank's file, each in a single write, so that a kill loses none of them.

    Args:
        path: the file; an existing file is continued, or overwritten if ``step`` is 0.
        full: whether entries also have the members of each group.
        rank: the rank of this process.
        world_size: the number of ranks.
        step: the updates done so far; entries of later steps in the file no longer count.
        max_bytes: the maximum size of the file.
    """

    def __init__(
        self, path: Path, *, full: bool, rank: int, world_size: int, step: int, max_bytes: int
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab" if step else "wb", buffering=0)
        self._size = self._file.seek(0, 2)
        self._max_bytes = max_bytes
        self._path = path
        self._is_full = False
        self._layouts: dict[tuple[Item, ...], int] = {}
        start = _record(_START, _START_FIELDS.pack(_VERSION, full, rank, world_size, step))
        self._append(_MAGIC + start)

    @property
    def stride(self) -> int:
        """The factor by which to lengthen the interval between entries, to limit the file's size.

        The factor doubles each time that half of the remaining size has been used.
        """
        available = max(1, self._max_bytes - self._size)
        return 1 << (self._max_bytes // available).bit_length() - 1

    def write(self, step: int, entry: Mapping[Item, int]) -> None:
        """Append the entry of a step, unless the file would become too large."""
        layout_items = tuple(entry)
        layout = self._layouts.get(layout_items, len(self._layouts))
        data = b""
        if layout == len(self._layouts):
            data = _record(_LAYOUT, json.dumps(layout_items).encode())
        hashes = struct.pack(f"<{len(layout_items)}q", *entry.values())
        data += _record(_ENTRY, _ENTRY_FIELDS.pack(layout, step) + hashes)
        if self._append(data):
            self._layouts[layout_items] = layout

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: bytes) -> bool:
        if self._size + len(data) > self._max_bytes:
            if not self._is_full:
                logger.warning("%s is full: no more steps are recorded (max_mib)", self._path)
            self._is_full = True
            return False
        self._size += self._file.write(data)
        return True


def _record(kind: int, content: bytes) -> bytes:
    check = _CHECK.pack(zlib.crc32(content, kind))
    return _HEAD.pack(kind, len(content)) + content + check


class _RankFile:
    """The valid entries in one rank's file, without steps that the run trained again later."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        # By step: layouts with offsets of their hashes; the number of ranks; whether it is full.
        self.entries: dict[int, list[tuple[tuple[Item, ...], int]]] = {}
        self.world_sizes: dict[int, int] = {}
        self.full: dict[int, bool] = {}
        at = self._data.find(_MAGIC)
        while at >= 0:
            # An incomplete record, after a kill, ends a session; the next one starts with _MAGIC.
            at = self._data.find(_MAGIC, self._read_session(path, at + len(_MAGIC)))

    def entry(self, step: int) -> Entry:
        hashes_by_item: Entry = {}
        for layout_items, at in self.entries[step]:
            hashes = struct.unpack_from(f"<{len(layout_items)}q", self._data, at)
            hashes_by_item.update(zip(layout_items, hashes, strict=True))
        return hashes_by_item

    def _read_session(self, path: Path, at: int) -> int:
        world_size, full = 0, 0
        layouts: list[tuple[Item, ...]] = []
        for kind, start, end in self._records(at):
            if kind == _START:
                version, full, _, world_size, step = _START_FIELDS.unpack_from(self._data, start)
                if version != _VERSION:
                    text = f"{path} has format {version}; this version reads {_VERSION}"
                    raise LedgerError(text)
                self.entries = {k: v for k, v in self.entries.items() if k <= step}
            elif kind == _LAYOUT:
                layouts.append(tuple(Item(*fields) for fields in json.loads(self._data[start:end])))
            else:
                layout, step = _ENTRY_FIELDS.unpack_from(self._data, start)
                position = (layouts[layout], start + _ENTRY_FIELDS.size)
                self.entries.setdefault(step, []).append(position)
                self.world_sizes[step], self.full[step] = world_size, bool(full)
            at = end + _CHECK.size
        return at

    def _records(self, at: int) -> Iterator[tuple[int, int, int]]:
        """Yield kind, start and end of the records from ``at`` on, up to the first invalid one."""
        while at + _HEAD.size <= len(self._data):
            kind, length = _HEAD.unpack_from(self._data, at)
            start = at + _HEAD.size
            at = start + length + _CHECK.size
            if kind not in (_START, _LAYOUT, _ENTRY) or at > len(self._data):
                return
            content = self._data[start : start + length]
            if zlib.crc32(content, kind) != _CHECK.unpack_from(self._data, start + length)[0]:
                return
            yield kind, start, start + length


class Ledger:
    """The entries of a run, as returned by ``read_ledger``.

    Attributes:
        folder: the folder of its files.
        steps: the updates for which every rank has an entry, ascending. The entry of the step at
            which a run started (0) or was resumed has the initial weights.
    """

    def __init__(self, folder: Path, files: Mapping[int, _RankFile]) -> None:
        self.folder = folder
        self._files = files
        self.steps = [step for step in sorted(files[0].entries) if self._is_whole(step)]

    def world_size(self, step: int) -> int:
        """Return the number of ranks at a step."""
        return self._files[0].world_sizes[step]

    def is_full(self, step: int) -> bool:
        """Return whether the entries of a step have each module, parameter and buffer."""
        return self._files[0].full[step]

    def entry(self, step: int, rank: int = 0) -> Entry:
        """Return the hashes of a rank's step, in the order of the table in docs/exactness.md.

        Raises:
            KeyError: ``step`` is not in ``steps``, or the rank did not exist.
        """
        if rank >= self.world_size(step):
            raise KeyError(f"rank {rank} of {self.world_size(step)}")
        return self._files[rank].entry(step)

    def _is_whole(self, step: int) -> bool:
        ranks = range(self.world_size(step))
        return all(rank in self._files and step in self._files[rank].entries for rank in ranks)


def read_ledger(path: Path | str) -> Ledger:
    """Return the ledger in a run's folder; the run may still be training.

    Raises:
        LedgerError: the ledger is missing or has a later format.
    """
    folder = Path(path)
    if (folder / "ledger").is_dir():
        folder /= "ledger"
    files = {int(file.stem[5:]): file for file in folder.glob("rank_*.bin")}
    if 0 not in files:
        hint = "train with `ledger: {every_steps: 10}`" if folder.is_dir() else "no such folder"
        raise LedgerError(f"{path} has no ledger: {hint}")
    return Ledger(folder, {rank: _RankFile(file) for rank, file in files.items()})


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: the number of the update, counted from 1. If weights differ at the start or at a
            resume, the number of updates before that.
        rank: the lowest rank with the difference.
        stage, name: the first item that differs, see ``Item``.
        agreed: the last step before it in which the ledgers agree; -1 if there is none.
    """

    step: int
    rank: int
    stage: str
    name: str
    agreed: int

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.stage}: {self.name}"


def first_difference(a: Ledger, b: Ledger, after: int = -1) -> Difference | None:
    """Return the first difference of two ledgers, in the steps after ``after`` that both have.

    If several items of a step differ, the one that comes first in the entries is returned, even if
    a later item differs on a lower rank. Only items that both ledgers have are compared: if only
    one ledger is full, groups are compared but not their members.

    Returns:
        The difference, or None if the ledgers agree.

    Raises:
        LedgerError: they have no step in common, or a step with different numbers of ranks.
    """
    steps = sorted(step for step in {*a.steps} & {*b.steps} if step > after)
    if not steps:
        raise LedgerError(f"{a.folder} and {b.folder} have no step in common")
    agreed = -1
    for step in steps:
        sizes = a.world_size(step), b.world_size(step)
        if sizes[0] != sizes[1]:
            raise LedgerError(
                "entries can be compared only if both runs have the same number of ranks, but at "
                f"step {step} {a.folder} has {sizes[0]} and {b.folder} has {sizes[1]}"
            )
        differences: list[tuple[int, int, Item]] = []
        for rank in range(sizes[0]):
            entry, other = a.entry(step, rank), b.entry(step, rank)
            order = enumerate(entry)
            differences += [(n, rank, i) for n, i in order if i in other and entry[i] != other[i]]
        if differences:
            _, rank, entry_item = min(differences)
            return Difference(step, rank, entry_item.stage, entry_item.name, agreed)
        agreed = step
    return None
