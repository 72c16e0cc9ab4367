"""The command ``bisect``: find where two runs differ, by their ledgers and by training again."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..loops import list_checkpoints
from ..registry import Config, RunSections, load_config
from ..runner.command.command import Options, mistake
from ..runner.jobs import on_ranks, prepared
from ..runner.launcher import started_outside
from ..runner.parts import build_parts
from ..runner.rank_processes import raising_stops
from ..runner.runner import Runner
from ..runner.sections import read_sections
from .ledger import Difference, Ledger, LedgerError, first_difference, read_ledger

_NAME = "stepwrap bisect"
# The exit code if the runs differ.
DIFFERENT = 3
# The stages for which full ledgers also have items by module and parameter.
_BY_PARTS = ("forward", "gradient", "update")
# When a run is repeated, these hooks are turned off, and its ledger has these settings.
_OFF = ("checkpoint", "progress", "log", "tensorboard", "throughput")
_FULL = "every_steps: 1, full: true, max_mib: 4096"


def run_bisect(options: Options) -> int:
    """Print where two runs first differ; return 0 if their ledgers do not differ."""
    folders = [Path(word) for word in options.words]
    if started_outside():
        raise mistake(f"{_NAME}: must be run without torchrun or srun; it starts its ranks itself")
    try:
        ledgers = a, b = read_ledger(folders[0]), read_ledger(folders[1])
        difference = first_difference(a, b)
    except LedgerError as error:
        raise mistake(f"{_NAME}: {error}") from error
    if difference is None:
        common = sorted({*a.steps} & {*b.steps})
        print(
            f"no difference in the {len(common)} steps that both ledgers have, from {common[0]} "
            f"to {common[-1]}"
        )
        return 0
    agreed = "" if difference.agreed < 0 else f"agree up to step {difference.agreed} and "
    print(f"the ledgers {agreed}differ at {difference}")
    if not options.no_rerun and _is_vague(difference, ledgers):
        with raising_stops(), tempfile.TemporaryDirectory(prefix="stepwrap_bisect_") as scratch:
            difference = _narrow(difference, folders, ledgers, Path(scratch))
    print(f"the runs first differ at {difference}")
    return DIFFERENT


def _is_vague(difference: Difference, ledgers: Sequence[Ledger]) -> bool:
    """Return whether training again can narrow the difference down.

    It can if steps just before the difference have no entries. It also can if a ledger is not full
    at the step that differs, and full ledgers have more items in the stage that differs.
    """
    if difference.agreed != difference.step - 1:
        return True
    return difference.stage in _BY_PARTS and not all(
        ledger.is_full(difference.step) for ledger in ledgers
    )


def _narrow(
    difference: Difference, folders: list[Path], ledgers: Sequence[Ledger], scratch: Path
) -> Difference:
    """Repeat both runs with full ledgers, and return their first difference.

    Returns ``difference`` if the repetitions do not differ, or if a run cannot be repeated exactly.
    """
    full = []
    for number, (folder, ledger) in enumerate(zip(folders, ledgers, strict=True)):
        repeated = _repeat(
            folder, difference, ledger.world_size(difference.step), scratch / str(number)
        )
        if difference.step not in repeated.steps:
            print(
                f"{folder} could not be repeated: the repetition ended before "
                f"step {difference.step}"
            )
            return difference
        try:
            other = first_difference(ledger, repeated)
        except LedgerError as error:
            print(f"{folder} could not be repeated: {error}")
            return difference
        if other is not None:
            print(
                f"{folder} is not repeatable: the ledger of the repetition differs from the "
                f"recorded one at {other}. Code, data or machine have changed since, or the run is "
                "not deterministic (set deterministic: true)"
            )
            return difference
        full.append(repeated)
    narrowed = first_difference(full[0], full[1])
    if narrowed is None:
        print("the repetitions do not differ")
    return narrowed or difference


def _repeat(folder: Path, difference: Difference, nproc: int, run_dir: Path) -> Ledger:
    """Train up to the difference from the nearest checkpoint before it; return the full ledger."""
    saved = [(meta["step"], path) for path, meta in list_checkpoints(folder / "checkpoints")]
    step, start = max(
        (checkpoint for checkpoint in saved if checkpoint[0] <= difference.agreed),
        default=(0, None),
    )
    source = start or "the beginning"
    print(f"repeating steps {step + 1} to {difference.step} of {folder} from {source}", flush=True)
    settings = folder / "config.yaml"
    if not settings.is_file():
        raise mistake(
            f"{_NAME}: {folder} needs the config.yaml of `stepwrap train` to repeat steps, and has "
            "none; use --no-rerun to compare only the ledgers"
        )
    overrides = [
        f"run_dir={json.dumps(str(run_dir))}",
        f"launch.nproc={nproc}",
        "ledger=false",
        f"hooks.ledger={{{_FULL}, until: {difference.step}}}",
        *(f"hooks.{name}=false" for name in _OFF),
    ]
    config = load_config(settings, overrides)
    run = read_sections(config)
    on_ranks(run, _train, config, run, start=start)
    return read_ledger(run_dir)


def _train(config: Config, run: RunSections, *, start: Path | None) -> None:
    """Train on this rank, without warnings about the hooks that a repetition turns off."""
    logging.disable(logging.WARNING)
    try:
        with prepared(config, run):
            run = run if start is None else run.without_loaded()
            Runner.from_parts(build_parts(run, ("train", "val"))).train(resume=start or False)
    finally:
        logging.disable(logging.NOTSET)
