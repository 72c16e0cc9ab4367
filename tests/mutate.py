"""Measure how many small faults in the core the quick tests of its folders find.

Each round changes one operator of one core file in a copy of the repository, such as ``<`` to
``<=``, and runs the folder's tests that are not marked slow. A change that no test notices is
listed: either a test is missing, or the change does not alter the behaviour. The same seed chooses
the same changes of the same sources.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Where a silent fault would give wrong weights or lose data: globs, and the tests of their folder.
CORE = {
    "wrappers": ("steps/*", "optimizers/*", "ddp/*", "batchnorm/*", "sharding/*", "replicas/*"),
    "loops": ("*", "data/*", "checkpoints/*"),
    "collectives": ("objects/*", "tensors/*", "groups/*"),
}
OTHER: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


class Change(NamedTuple):
    """Another operator at one place.

    Attributes:
        file: relative to the repository.
        start: offset of the operator in the file's bytes.
    """

    file: Path
    start: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with the other operator."""
        end = self.start + len(self.before.encode())
        return source[: self.start] + self.after.encode() + source[end:]


def changes(file: Path) -> Iterator[Change]:
    """Yield the possible changes of a file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for left, operator, right in operators(ast.parse(source)):
        begin = starts[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        end = starts[right.lineno - 1] + right.col_offset
        before, after = OTHER[type(operator)]
        at = source.find(before.encode(), begin, end)
        if at >= 0:
            yield Change(file, at, before, after)


def operators(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST, ast.expr]]:
    """Yield binary operators with their operands, except in annotations and error messages."""
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.BinOp):
        yield node.left, node.op, node.right
    elif isinstance(node, ast.Compare):
        yield node.left, node.ops[0], node.comparators[0]
    elif isinstance(node, ast.BoolOp):
        yield node.values[0], node.op, node.values[1]
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from (found for found in operators(child) if type(found[1]) in OTHER)


def chosen(count: int, seed: int, only: str) -> list[Change]:
    """Draw the changes, an equal chance for each place."""
    globs = [f"{folder}/{glob}.py" for folder, rooms in CORE.items() for glob in rooms]
    files = sorted({path.relative_to(ROOT) for glob in globs for path in ROOT.glob(glob)})
    places = [one for file in files if only in str(file) for one in changes(file)]
    return random.Random(seed).sample(places, min(count, len(places)))


def copy_to(folder: Path) -> dict[str, str]:
    """Copy the repository's files; return an environment in which the copy is imported."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    package = folder / "build" / "mutate" / "stepwrap"
    package.mkdir(parents=True)
    for source in folder.glob("*/__init__.py"):
        (package / source.parent.name).symlink_to(source.parent)
    environ = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import stepwrap.loops; print(stepwrap.loops.__file__)"],
        cwd=folder, check=True, capture_output=True, text=True, env=environ,
    )  # fmt: skip
    if not Path(found.stdout.strip()).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"tests must import the copy, and would import {found.stdout.strip()}")
    return environ


def passes(name: str, folder: Path, environ: dict[str, str], limit_s: float) -> bool:
    """Return whether the quick tests of a source folder pass within the limit."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile"]
    process = subprocess.Popen(
        [*pytest, "-m", "not slow", f"tests/{name}"],
        cwd=folder, env=environ, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        # Workers and ranks too, if there are any left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_found(change: Change, folder: Path, environ: dict[str, str], limit_s: float) -> bool:
    """Run the tests of the folder that is changed; a run that does not end counts as found."""
    place = folder / change.file
    source = place.read_bytes()
    place.write_bytes(change.apply(source))
    try:
        return not passes(change.file.parts[0], folder, environ, limit_s)
    finally:
        place.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how many small faults the tests find.")
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the files' paths")
    parser.add_argument("--limit-s", type=float, default=900, help="of one run of the tests")
    options = parser.parse_args()
    drawn = chosen(options.changes, options.seed, options.only)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        environ = copy_to(Path(folder))
        for name in sorted({change.file.parts[0] for change in drawn}):
            if not passes(name, Path(folder), environ, options.limit_s):
                raise SystemExit(f"tests/{name} must pass before anything is changed")
        for change in drawn:
            begin = time.perf_counter()
            found = is_found(change, Path(folder), environ, options.limit_s)
            survivors += not found
            line = (ROOT / change.file).read_bytes()[: change.start].count(b"\n") + 1
            print(
                f"{'found' if found else 'NOT FOUND':9} {time.perf_counter() - begin:4.0f} s "
                f"{change.file}:{line}: {change.before} -> {change.after}",
                flush=True,
            )
    print(f"{len(drawn) - survivors} of {len(drawn)} changes were found")


if __name__ == "__main__":
    main()
