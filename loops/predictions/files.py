"""Rows in files: the part that each rank writes, and the file that they are merged into."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from .rows import Row

# The data type and the shape of one sample of each numeric field.
Types: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]

INDEX = "index"
FORMATS = (".jsonl", ".parquet", ".npz")
# Rows that are in memory at once where a format writes many together.
_ROWS = 1024


def check_path(path: Path) -> None:
    """Check that predictions can be written to ``path``, before any are made.

    Raises:
        ValueError: the suffix is not one of ``FORMATS``.
        FileExistsError: the file exists.
        ImportError: the package for the format is not installed.
    """
    if path.suffix not in FORMATS:
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(f"predictions are written to files that end in {known}, got {path.name!r}")
    if path.exists():
        raise FileExistsError(
            f"predictions need a new file, and {path} exists: remove it, or choose another name"
        )
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "predictions in .parquet files need pyarrow: pip install 'stepwrap[parquet]'"
            ) from error


class PartWriter:
    """Writes the rows of one rank as lines of JSON, each after the row's index.

    Attributes:
        types: the data type and shape of each numeric field, taken from the first row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.types: Types = {}
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._rows = 0

    def write(self, index: int, row: Row) -> None:
        """Add a row; indices must increase."""
        if not self._rows:
            self.types = {name: _type_of(one) for name, one in row.items() if _is_numeric(one)}
        self._file.write(f"{index}\t{json.dumps(row, default=_as_list)}\n")
        self._rows += 1

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.generic, np.ndarray))


def _type_of(value: Any) -> tuple[str, tuple[int, ...]]:
    array = np.asarray(value)
    return array.dtype.str, array.shape


def _as_list(value: Any) -> Any:
    return value.tolist()


def merge_parts(parts: Iterable[Path], path: Path, types: Types) -> int:
    """Merge parts by index into ``path`` and return the number of rows.

    The file appears at its path when it is complete. Memory does not grow with the rows.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
            rows = merge(*map(_rows_in, files), key=lambda row: row[INDEX])
            if path.suffix == ".jsonl":
                count = _write_lines(rows, draft)
            elif path.suffix == ".parquet":
                count = _write_parquet(rows, draft)
            else:
                count = _write_arrays(rows, draft, {INDEX: ("<i8", ()), **types})
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return count


def _rows_in(file: TextIO) -> Iterator[Row]:
    for line in file:
        index, _, row = line.partition("\t")
        yield {INDEX: int(index), **json.loads(row)}


def _write_lines(rows: Iterable[Row], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(f"{json.dumps(_finite(row), allow_nan=False)}\n")
            count += 1
    return count


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as texts, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def _write_parquet(rows: Iterator[Row], path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    count, schema = 0, None
    with ExitStack() as stack:
        while some := list(islice(rows, _ROWS)):
            table = pyarrow.Table.from_pylist(some, schema)
            if schema is None:
                schema = table.schema
                writer = stack.enter_context(pyarrow.parquet.ParquetWriter(path, schema))
            writer.write_table(table)
            count += len(some)
    return count


def _write_arrays(rows: Iterable[Row], path: Path, types: Types) -> int:
    count = 0
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ExitStack() as stack:
        raw = {name: Path(folder, str(at)) for at, name in enumerate(types)}
        files = {name: stack.enter_context(one.open("wb")) for name, one in raw.items()}
        for row in rows:
            count += 1
            for name, (dtype, shape) in types.items():
                files[name].write(_array(row, name, dtype, shape).tobytes())
        for file in files.values():
            file.flush()
        with zipfile.ZipFile(path, "w") as archive:
            for name, (dtype, shape) in types.items():
                header = {"descr": dtype, "fortran_order": False, "shape": (count, *shape)}
                with (
                    archive.open(f"{name}.npy", "w", force_zip64=True) as entry,
                    raw[name].open("rb") as values,
                ):
                    np.lib.format.write_array_header_1_0(entry, header)
                    shutil.copyfileobj(values, entry)
    return count


def _array(row: Row, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    found = np.shape(row[name]) if name in row else None
    if found != shape:
        got = "no such field" if found is None else f"shape {found}"
        raise ValueError(
            f"an .npz file needs the same fields and shapes for all samples: {name!r} of the first "
            f"sample has shape {shape}, and sample {row[INDEX]} has {got}; write to .jsonl instead"
        )
    return np.asarray(row[name], dtype=dtype)
