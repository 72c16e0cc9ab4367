"""Run the whole parity matrix, print it and write docs/parity.md; `make parity`.

    python tests/wrappers/parity_report.py [--rows ddp fsdp] [--output docs/parity.md]

The exit status is 1 if a result exceeds its bound or a cell could not be run.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from parity_cells import (  # noqa: E402  # noqa: E402  # noqa: E402
    KINDS,
    Load,
    Outcome,
    filled,
    first_line,
    get_recipes,
    load_all,
    run_row,
    worst,
    write_references,
)
from parity_page import page  # noqa: E402
from parity_plain import Recipe  # noqa: E402
from ranks import RanksError, shutdown  # noqa: E402

MODELS = ("transformer", "cnn")
TIMEOUT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs/parity.md")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Every accumulating cell warns about BatchNorm, which the matrix uses on purpose.
    logging.disable(logging.WARNING)
    rows = [(kind, world) for kind, world in filled() if kind in arguments.rows]
    started = time.monotonic()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="parity_") as folder:
        cells = train_rows(rows, Path(folder), failures)
        loads = load_rows(rows, cells, failures)
    shutdown()
    broken = [describe(result) for result in (*cells, *loads) if not result.is_within]
    text = page(cells, loads, failures, minutes=(time.monotonic() - started) / 60)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)
    for line in (*failures, *broken):
        print("BROKEN:", line)
    return 1 if failures or broken else 0


def train_rows(rows: list[tuple[str, int]], folder: Path, failures: list[str]) -> list[Outcome]:
    """Run all cells of the rows; failed cells are added to `failures`."""
    recipes = {
        kind: [recipe for model in MODELS for recipe in get_recipes(kind, model)] for kind in KINDS
    }
    references = folder / "references.pt"
    write_references(references, [recipe for kind, _ in rows for recipe in recipes[kind]])
    cells: list[Outcome] = []
    for kind, world in rows:
        for model in MODELS:
            mine = [recipe for recipe in recipes[kind] if recipe.model == model]
            try:
                done = run_row(kind, world, mine, references, folder / "checkpoints", TIMEOUT_S)
            except RanksError as error:
                failures.append(f"{kind}, {world} ranks, {model}: {first_line(error)}")
                continue
            cells += done
            largest = worst(cell.parameters for cell in done if cell.recipe.dtype == "fp64")
            seconds = sum(cell.seconds for cell in done)
            print(f"{kind:15} {world} {model:12} fp64 {largest:.1e}   {seconds:5.1f} s", flush=True)
    return cells


def load_rows(rows: list[tuple[str, int]], cells: list[Outcome], failures: list[str]) -> list[Load]:
    """Load every checkpoint under every row; failed cells are added to `failures`."""
    loads: list[Load] = []
    for kind, world in rows:
        try:
            done = load_all(kind, world, cells, TIMEOUT_S)
        except RanksError as error:
            failures.append(f"loading under {kind}, {world} ranks: {first_line(error)}")
            continue
        loads += done
        largest = worst(load.difference for load in done)
        print(f"{kind:15} {world} {len(done)} checkpoints loaded, {largest:.1e}", flush=True)
    return loads


def describe(broken: Outcome | Load) -> str:
    """Return a text about a cell that exceeds its bound."""
    if isinstance(broken, Load):
        source = broken.source
        where = f"{source.kind}, {source.world} ranks, {source.recipe}"
        return f"{where}, loaded under {broken.kind}, {broken.world}: {broken.difference:.1e}"
    recipe: Recipe = broken.recipe
    differences = f"{broken.parameters:.1e}, loss {broken.losses:.1e}"
    return f"{broken.kind}, {broken.world} ranks, {recipe}: {differences}"


if __name__ == "__main__":
    sys.exit(main())
