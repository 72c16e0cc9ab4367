"""The ledger of a run: its files, written and read, and the comparison of two ledgers.

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
# Version, whether full, rank, ranks, step.
_START_FIELDS = struct.Struct("<IIIIQ")
# Number of the layout, step.
_ENTRY_FIELDS = struct.Struct("<IQ")


class LedgerError(ValueError):
    """A ledger is missing or of a later format, or two of them cannot be compared."""


class Item(NamedTuple):
    """What one hash of an entry is of.

    Attributes:
        stage: "data", "random state", "forward", "gradient" or "update".
        name: Of a part of the batch, a stream, a log value or module, a parameter or their group.
    """

    stage: str
    name: str


Entry = dict[Item, int]


class LedgerWriter:
    """Appends the entries of one rank to its file, each in one go, so that a kill loses none.

    Args:
        path: The file; an existing file is continued, or overwritten if `step` is 0.
        full: Whether entries have parts of their groups as well.
        rank: Whose entries they are.
        world_size: Of how many ranks.
        step: The updates done so far; later entries in the file no longer count.
        max_bytes: The file never becomes larger.
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
        """How many times longer the interval between entries must be for the file to suffice.

        It doubles each time that half of the room that is left has been used.
        """
        left = max(1, self._max_bytes - self._size)
        return 1 << (self._max_bytes // left).bit_length() - 1

    def write(self, step: int, entry: Mapping[Item, int]) -> None:
        """Append an entry, unless the file would become too large."""
        items = tuple(entry)
        layout = self._layouts.get(items, len(self._layouts))
        data = b""
        if layout == len(self._layouts):
            data = _record(_LAYOUT, json.dumps(items).encode())
        hashes = struct.pack(f"<{len(items)}q", *entry.values())
        data += _record(_ENTRY, _ENTRY_FIELDS.pack(layout, step) + hashes)
        if self._append(data):
            self._layouts[items] = layout

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
    """The valid entries in one rank's file, without abandoned branches of the run."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        # By step: layouts, and where the hashes begin; how many ranks there were, whether full.
        self.entries: dict[int, list[tuple[tuple[Item, ...], int]]] = {}
        self.world_sizes: dict[int, int] = {}
        self.full: dict[int, bool] = {}
        at = self._data.find(_MAGIC)
        while at >= 0:
            # A record that was cut off by a kill ends what was written in one go.
            at = self._data.find(_MAGIC, self._read_session(path, at + len(_MAGIC)))

    def entry(self, step: int) -> Entry:
        found: Entry = {}
        for items, at in self.entries[step]:
            hashes = struct.unpack_from(f"<{len(items)}q", self._data, at)
            found.update(zip(items, hashes, strict=True))
        return found

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
                layouts.append(tuple(Item(*one) for one in json.loads(self._data[start:end])))
            else:
                layout, step = _ENTRY_FIELDS.unpack_from(self._data, start)
                place = (layouts[layout], start + _ENTRY_FIELDS.size)
                self.entries.setdefault(step, []).append(place)
                self.world_sizes[step], self.full[step] = world_size, bool(full)
            at = end + _CHECK.size
        return at

    def _records(self, at: int) -> Iterator[tuple[int, int, int]]:
        """Yield kind, start and end of the records from `at` on, as long as they are whole."""
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
    """The entries of a run, as `read_ledger` returns them.

    Attributes:
        folder: Where its files are.
        steps: The updates of which every rank has an entry, ascending. Under the number at which a
            run started, or was resumed, are the weights that it started with.
    """

    def __init__(self, folder: Path, files: Mapping[int, _RankFile]) -> None:
        self.folder = folder
        self._files = files
        self.steps = [step for step in sorted(files[0].entries) if self._is_whole(step)]

    def world_size(self, step: int) -> int:
        """Return how many ranks there were at a step."""
        return self._files[0].world_sizes[step]

    def is_full(self, step: int) -> bool:
        """Say whether the entries of a step have modules, parameters and buffers by themselves."""
        return self._files[0].full[step]

    def entry(self, step: int, rank: int = 0) -> Entry:
        """Return the hashes of a rank's step in the order in which they were taken.

        Raises:
            KeyError: `step` is not in `steps`, or the rank did not exist.
        """
        if rank >= self.world_size(step):
            raise KeyError(f"rank {rank} of {self.world_size(step)}")
        return self._files[rank].entry(step)

    def _is_whole(self, step: int) -> bool:
        ranks = range(self.world_size(step))
        return all(rank in self._files and step in self._files[rank].entries for rank in ranks)


def read_ledger(path: Path | str) -> Ledger:
    """Return the ledger in a run's folder, also of a run that is still training.

    Raises:
        LedgerError: There is none, or it is of a later format.
    """
    folder = Path(path)
    if (folder / "ledger").is_dir():
        folder /= "ledger"
    found = {int(file.stem[5:]): file for file in folder.glob("rank_*.bin")}
    if 0 not in found:
        hint = "train with `ledger: {every_steps: 10}`" if folder.is_dir() else "no such folder"
        raise LedgerError(f"{path} has no ledger: {hint}")
    return Ledger(folder, {rank: _RankFile(file) for rank, file in found.items()})


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: The number of the update, the first is 1; or of the updates before a start.
        rank: The lowest rank of those that differ first.
        stage, name: As in `Item`, the first that differs.
        agreed: The last step before it of which the ledgers agree, -1 if there is none.
    """

    step: int
    rank: int
    stage: str
    name: str
    agreed: int

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.stage}: {self.name}"


def first_difference(a: Ledger, b: Ledger, after: int = -1) -> Difference | None:
    """Return where two ledgers differ first, in the steps after `after` that both have.

    Within a step what was hashed earlier comes first, on whatever rank. Only hashes of the same
    things are compared: where one ledger is full and the other not, the groups.

    Raises:
        LedgerError: They have no step in common, or one from different numbers of ranks.
    """
    steps = sorted(step for step in {*a.steps} & {*b.steps} if step > after)
    if not steps:
        raise LedgerError(f"{a.folder} and {b.folder} have no step in common")
    agreed = -1
    for step in steps:
        sizes = a.world_size(step), b.world_size(step)
        if sizes[0] != sizes[1]:
            raise LedgerError(
                f"at step {step} {a.folder} is of {sizes[0]} ranks and {b.folder} of {sizes[1]}: "
                "entries can be compared rank by rank only"
            )
        found: list[tuple[int, int, Item]] = []
        for rank in range(sizes[0]):
            own, other = a.entry(step, rank), b.entry(step, rank)
            order = enumerate(own)
            found += [(n, rank, i) for n, i in order if i in other and own[i] != other[i]]
        if found:
            _, rank, item = min(found)
            return Difference(step, rank, item.stage, item.name, agreed)
        agreed = step
    return None
