"""Measure how many small faults in the core the quick tests of its folders find.

One operator of one core file is changed in a copy of the repository, such as ``<`` to ``<=``, and
the folder's quick tests run until one fails. A change that no test notices is
listed: either a test is missing, or the change does not alter the behaviour. The same seed chooses
the same changes of the same sources.

To save time, the test files that name most of the changed module's functions run first, for every
change; the other files of the folder run only for the changes that those have not found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Files in which a silent fault gives wrong weights or loses data, and the tests of their folder.
CORE = {
    "wrappers": ("steps/*", "optimizers/*", "ddp/*", "batchnorm/*", "sharding/*", "replicas/*"),
    "loops": ("*", "data/*", "checkpoints/*"),
    "collectives": ("objects/*", "tensors/*", "groups/*"),
}
# How many test files run first.
LIKELY = 8
TIMED_OUT = "timed out"
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

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"

    @property
    def line(self) -> int:
        return (ROOT / self.file).read_bytes()[: self.start].count(b"\n") + 1

    def apply(self, source: bytes) -> bytes:
        end = self.start + len(self.before.encode())
        return source[: self.start] + self.after.encode() + source[end:]


def changes(file: Path) -> Iterator[Change]:
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for left_operand, operator, right_operand in operators(ast.parse(source)):
        begin = starts[(left_operand.end_lineno or 1) - 1] + (left_operand.end_col_offset or 0)
        end = starts[right_operand.lineno - 1] + right_operand.col_offset
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
                yield from (operator for operator in operators(child) if type(operator[1]) in OTHER)


def chosen(count: int, seed: int, only: str) -> list[Change]:
    """Draw changes; each place has an equal chance."""
    globs = [f"{folder}/{glob}.py" for folder, rooms in CORE.items() for glob in rooms]
    files = sorted({path.relative_to(ROOT) for glob in globs for path in ROOT.glob(glob)})
    candidates = [change for file in files if only in str(file) for change in changes(file)]
    return random.Random(seed).sample(candidates, min(count, len(candidates)))


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
    location = subprocess.run(
        [sys.executable, "-c", "import stepwrap.loops; print(stepwrap.loops.__file__)"],
        cwd=folder, check=True, capture_output=True, text=True, env=environ,
    )  # fmt: skip
    if not Path(location.stdout.strip()).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"tests must import the copy, and would import {location.stdout.strip()}")
    return environ


def split_tests(change: Change) -> tuple[list[str], list[str]]:
    """Return the test files most likely to fail, and the other files of the folder.

    These files use most of the names of the changed module, of its path and of what it defines. A
    name counts more if few files use it, and if its definition is changed.
    """
    weights = Counter(re.findall("[a-z]+", str(change.file.with_suffix("")).partition("/")[2]))
    for node in ast.walk(ast.parse((ROOT / change.file).read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            weights[node.name] += 5 if node.lineno <= change.line <= (node.end_lineno or 0) else 1
    tests = sorted((ROOT / "tests" / change.file.parts[0]).glob("test_*.py"))
    used = {
        test: weights.keys() & {*test.stem.split("_"), *re.findall(r"\w+", test.read_text())}
        for test in tests
    }
    files = Counter(name for names in used.values() for name in names)
    tests.sort(key=lambda test: -sum(weights[name] / files[name] for name in used[test]))
    paths = [str(test.relative_to(ROOT)) for test in tests]
    return paths[:LIKELY], paths[LIKELY:]


def first_failure(
    tests: list[str], folder: Path, environ: dict[str, str], limit_s: float
) -> str | None:
    """Return the name of a quick test that fails, None if all pass, or that they timed out."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-m"]
    pytest += ["not slow and not nightly"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*pytest, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *tests],
            cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            # Also kill remaining workers and ranks.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    # Status 5: all tests of these files are slow.
    return None if status in (0, 5) else failed[1] if failed else f"pytest's exit status {status}"


def found_by(
    change: Change, tests: list[str], folder: Path, environ: dict[str, str], limit_s: float
) -> str | None:
    """Run tests with one change; return as `first_failure`.

    A failure counts if the file fails again, because tests may also fail on a busy machine.
    """
    path = folder / change.file
    source = path.read_bytes()
    path.write_bytes(change.apply(source))
    try:
        while True:
            failed = first_failure(tests, folder, environ, limit_s)
            if failed in (None, TIMED_OUT):
                return failed
            file = failed.partition("::")[0]
            again = [file] if (folder / file).exists() else tests
            if first_failure(again, folder, environ, limit_s):
                return failed
    finally:
        path.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how many small faults the tests find.")
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the files' paths")
    parser.add_argument("--limit-s", type=float, default=900, help="of one run of the tests")
    options = parser.parse_args()
    drawn = chosen(options.changes, options.seed, options.only)
    untried = drawn
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = copy_to(folder)
        for tested in sorted({f"tests/{change.file.parts[0]}" for change in drawn}):
            failed = first_failure([tested], folder, environ, options.limit_s)
            if failed:
                raise SystemExit(f"{tested} must pass before anything is changed: {failed}")
        for subset, missed in enumerate(("not found yet", "NOT FOUND")):
            tried, untried = untried, []
            for change in tried:
                tests = split_tests(change)[subset]
                failed = found_by(change, tests, folder, environ, options.limit_s)
                print(f"{change}: {failed or missed}", flush=True)
                if failed in (None, TIMED_OUT):
                    untried.append(change)
    print(f"{len(drawn) - len(untried)} of {len(drawn)} changes were found")


if __name__ == "__main__":
    main()
