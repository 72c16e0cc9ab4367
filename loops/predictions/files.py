"""Write rows to files: one part for each rank, and the file into which they are merged."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from glob import escape
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from ...primitives.files import replacing
from ...registry.local_paths import require_local
from .rows import Row

INDEX = "index"
FORMATS = (".jsonl", ".parquet", ".npz")
# The number of rows in memory, in formats that write many rows at once.
_ROWS = 1024
# The type of a column: a scalar's name, a list with the type of its entries, or a dict of types.
_Kind: TypeAlias = "str | list[Any] | dict[str, Any]"
_NULL = "null"
_SCALARS = {type(None): _NULL, bool: "bool", int: "int64", float: "double", str: "string"}


def check_path(path: Path) -> None:
    """Check that predictions can be written to ``path``; called before any are computed.

    Raises:
        ValueError: the suffix is not one of ``FORMATS``.
        FileExistsError: the file exists.
        ImportError: the package for the format is not installed.
    """
    require_local(path, "the file for predictions")
    if path.suffix not in FORMATS:
        suffixes = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise ValueError(
            f"predictions are written to files that end in {suffixes}, got {path.name!r}"
        )
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


@dataclass
class Field:
    """A numeric field of rows.

    Attributes:
        dtype: a data type that can hold the values of all rows.
        shapes: the shapes that the values have.
        count: how many rows have the field.
    """

    dtype: np.dtype[Any]
    shapes: set[tuple[int, ...]]
    count: int

    def add(self, other: Field) -> None:
        """Include other rows."""
        self.dtype = np.result_type(self.dtype, other.dtype)
        self.shapes |= other.shapes
        self.count += other.count


Fields: TypeAlias = dict[str, Field]


class PartWriter:
    """Write the rows of one rank, each as a line: the row's index, a tab and JSON.

    Attributes:
        fields: the numeric fields of the rows so far.
        others: names of other fields.
        count: the number of rows so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: Fields = {}
        self.others: set[str] = set()
        self.count = 0
        self._file: TextIO = path.open("w", encoding="utf-8")

    def write(self, index: int, row: Row) -> None:
        """Add a row; indices must increase.

        Raises:
            ValueError: the row has a field ``index``.
        """
        if INDEX in row:
            raise ValueError(
                f"predictions store the sample's index as {INDEX!r}, but test_step returns a field "
                "of this name: rename it"
            )
        for name, value in row.items():
            array = np.asarray(value) if _may_be_numeric(value) else None
            if array is None or array.dtype.kind not in "biuf":
                self.others.add(name)
            else:
                add_field(self.fields, name, Field(array.dtype, {array.shape}, 1))
        self._file.write(f"{index}\t{json.dumps(row, default=_as_list)}\n")
        self.count += 1

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def add_field(fields: Fields, name: str, field: Field) -> None:
    """Add rows of a field to ``fields``."""
    if name in fields:
        fields[name].add(field)
    else:
        fields[name] = field


def _may_be_numeric(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.generic, np.ndarray))


def _as_list(value: Any) -> Any:
    return value.tolist()


def require_arrays(fields: Fields) -> None:
    """Raise ValueError if no field can be an array of an ``.npz`` file."""
    if fields.keys() <= {INDEX}:
        raise ValueError(
            "an .npz file holds a number or an array of numbers for each sample, and no field of "
            "the predictions is one; write to .jsonl or .parquet instead"
        )


def merge_parts(paths: Iterable[Path], path: Path, fields: Fields) -> int:
    """Merge parts by index into ``path`` and return the number of rows.

    The file appears when it is complete. Memory does not grow with the number of rows.

    Raises:
        FileExistsError: the file has appeared in the meantime.
        ValueError: the format cannot hold the rows.
    """
    with replacing(path) as draft, ExitStack() as stack:
        files = [stack.enter_context(part_path.open(encoding="utf-8")) for part_path in paths]
        if path.suffix == ".jsonl":
            count = _write_lines(_merged_rows(files), draft)
        elif path.suffix == ".parquet":
            count = _write_parquet(files, draft)
        else:
            count = _write_arrays(_merged_rows(files), draft, fields)
        check_path(path)
    return count


def remove_leftovers(path: Path) -> None:
    """Remove the files that an interrupted prediction has left next to ``path``."""
    name = escape(path.name)
    for pattern in (f".{name}.part*", f".{name}.tmp*"):
        for leftover in path.parent.glob(pattern):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def get_part(path: Path, shard: int) -> Path:
    """Return the path of the part that the rank with index ``shard`` writes."""
    return path.with_name(f".{path.name}.part{shard}")


def _merged_rows(files: Iterable[TextIO]) -> Iterator[Row]:
    """Return the rows of all parts by index."""
    return merge(*map(_rows_in, files), key=lambda row: row[INDEX])


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
    """Return ``value`` with NaN and infinities as texts, since JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


def _write_parquet(files: Sequence[TextIO], path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    columns = _find_columns(_merged_rows(files))
    schema = pyarrow.schema({name: _arrow_type(kind) for name, kind in columns.items()})
    for file in files:
        file.seek(0)
    rows, count = _merged_rows(files), 0
    try:
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            while chunk := list(islice(rows, _ROWS)):
                arrays = [_arrow_array(chunk, field) for field in schema]
                writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
                count += len(chunk)
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"a .parquet file cannot hold the predictions ({error}); write to .jsonl instead"
        ) from error
    return count


class _MixedTypesError(Exception):
    """Two values of a column have types that no type holds without a change."""


def _find_columns(rows: Iterable[Row]) -> dict[str, _Kind]:
    """Return all columns with types that hold the values of all rows exactly.

    Raises:
        ValueError: a column has values of different types.
    """
    columns: dict[str, _Kind] = {INDEX: _SCALARS[int]}
    for row in rows:
        for name, value in row.items():
            try:
                columns[name] = _common(columns.get(name, _NULL), _column_kind(value))
            except _MixedTypesError as error:
                before, after = map(_described, error.args)
                raise ValueError(
                    f"sample {row[INDEX]}: a column of .parquet holds values of one type, but "
                    f"{name!r} has {before} before and {after} here; write to .jsonl instead"
                ) from None
    return columns


def _column_kind(value: Any) -> _Kind:
    """Return the type of a value that was read from JSON."""
    if isinstance(value, dict):
        return {key: _column_kind(entry) for key, entry in value.items()}
    if not isinstance(value, list):
        return _SCALARS[type(value)]
    types = dict.fromkeys(map(type, value))
    is_flat = types.keys() <= _SCALARS.keys()
    common: _Kind = _NULL
    for kind in map(_SCALARS.__getitem__, types) if is_flat else map(_column_kind, value):
        common = _common(common, kind)
    return [common]


def _common(before: _Kind, after: _Kind) -> _Kind:
    """Return the type that holds values of both types exactly; integers may become floats."""
    if before == after or after == _NULL:
        return before
    if before == _NULL:
        return after
    if isinstance(before, dict) and isinstance(after, dict):
        further = {key: _common(before.get(key, _NULL), kind) for key, kind in after.items()}
        return before | further
    if isinstance(before, list) and isinstance(after, list):
        return [_common(before[0], after[0])]
    if sorted(map(_described, (before, after))) == ["double", "int64"]:
        return "double"
    raise _MixedTypesError(before, after)


def _described(kind: _Kind) -> str:
    return kind if isinstance(kind, str) else "a list" if isinstance(kind, list) else "a mapping"


def _arrow_type(kind: _Kind) -> Any:
    import pyarrow

    if isinstance(kind, dict):
        return pyarrow.struct({name: _arrow_type(entry) for name, entry in kind.items()})
    if isinstance(kind, list):
        return pyarrow.list_(_arrow_type(kind[0]))
    return pyarrow.type_for_alias(kind)


def _arrow_array(rows: list[Row], field: Any) -> Any:
    """Return a column of rows; missing values are null.

    Raises:
        ValueError: an integer is too large for the column's type, or a text is not Unicode.
    """
    import pyarrow

    refusals = (pyarrow.ArrowException, OverflowError, UnicodeError)
    try:
        return pyarrow.array([row.get(field.name) for row in rows], type=field.type)
    except refusals:
        for row in rows:
            try:
                pyarrow.array([row.get(field.name)], type=field.type)
            except refusals as error:
                raise ValueError(
                    f"sample {row[INDEX]}: the column {field.name!r} of .parquet has the type "
                    f"{field.type}, which cannot hold this value ({error}); write to .jsonl instead"
                ) from error
        raise


def _write_arrays(rows: Iterable[Row], path: Path, fields: Fields) -> int:
    total = fields[INDEX].count
    require_arrays(fields)
    for name, field in fields.items():
        if field.count != total or len(field.shapes) != 1:
            shapes = ", ".join(map(str, sorted(field.shapes)))
            raise ValueError(
                f"an .npz file needs the same fields and shapes for all samples, but {name!r} is "
                f"in {field.count} of {total} samples and has the shapes {shapes}; write to .jsonl "
                "instead"
            )
    folder = tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent)
    with folder as temp_folder, ExitStack() as stack:
        raw = {name: Path(temp_folder, str(at)) for at, name in enumerate(fields)}
        files = {name: stack.enter_context(file.open("wb")) for name, file in raw.items()}
        for row in rows:
            for name, field in fields.items():
                files[name].write(_as_dtype(row[name], name, field, row[INDEX]).tobytes())
        for file in files.values():
            file.flush()
        with zipfile.ZipFile(path, "w") as archive:
            for name, field in fields.items():
                shape = (total, *next(iter(field.shapes)))
                descr = np.lib.format.dtype_to_descr(field.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                with (
                    archive.open(f"{name}.npy", "w", force_zip64=True) as entry,
                    raw[name].open("rb") as values,
                ):
                    np.lib.format.write_array_header_1_0(entry, header)
                    shutil.copyfileobj(values, entry)
    return total


def _as_dtype(value: Any, name: str, field: Field, index: int) -> np.ndarray[Any, Any]:
    """Return a value as an array; ValueError if it has integers that the data type rounds."""
    array = np.asarray(value, dtype=field.dtype)
    if field.dtype.kind == "f":
        exact = np.asarray(value)
        # Lists are compared, since NumPy compares integers and floats as floats.
        if exact.dtype.kind in "iu" and exact.tolist() != array.tolist():
            raise ValueError(
                f"sample {index}: {name!r} has integers that {field.dtype}, the data type of all "
                "samples in an .npz file, does not hold exactly; write to .jsonl instead"
            )
    return array
