"""What a run folder holds, and whether another run may use it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..loops import CheckpointError, find_checkpoint
from ..registry import Problem, did_you_mean

_RECORDS = ("metrics.jsonl", "metrics.csv", "curves.png", "config.yaml")


def occupied(run_dir: Path) -> Problem | None:
    """Return what keeps a new run out of `run_dir`: the results of an earlier one."""
    checkpoints = saved_checkpoints(run_dir)
    records = run_dir / "metrics.jsonl"
    if checkpoints:
        holds = f"{len(checkpoints)} checkpoint(s), the last {checkpoints[-1].name}"
    elif records.exists() and records.stat().st_size:
        holds = "the records of a run without checkpoints"
    else:
        return None
    what = (
        f"{run_dir} already holds {holds}; continue that run with --resume, start another one "
        f"with --run-dir {_free_name(run_dir)}, or delete its results with --fresh"
    )
    return Problem("run_dir", what)


def saved_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in `run_dir`, the last one last."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def resolve_checkpoint(run_dir: Path, which: str = "") -> Path:
    """Return the checkpoint that `which` names; every rank must call this.

    Args:
        run_dir: The run's folder.
        which: "best" or "latest" of it, the path of a checkpoint or of another run's folder;
            by default the best, else the latest.

    Raises:
        CheckpointError: There is none.
    """
    if which not in ("", "best", "latest"):
        return _at_path(run_dir, Path(which))
    if which:
        path = find_checkpoint(run_dir, "best" if which == "best" else "latest")
    else:
        path = find_checkpoint(run_dir, "best") or find_checkpoint(run_dir, "latest")
    if path is None:
        kind = f"{which} checkpoint" if which else "checkpoint"
        raise CheckpointError(
            f"there is no {kind} in {run_dir}: train first, or name one by its path"
        )
    return path


def _at_path(run_dir: Path, path: Path) -> Path:
    if (path / "checkpoints").is_dir():
        return resolve_checkpoint(path, "latest")
    if path.exists():
        return path
    folder = path.parent if path.parent.is_dir() else run_dir / "checkpoints"
    there = [str(folder / one.name) for one in sorted(folder.glob("step_*"))]
    near = did_you_mean(str(path), there) or did_you_mean(str(path), ("best", "latest"))
    raise CheckpointError(f"there is no checkpoint {path}{near}")


@contextmanager
def new_folder(run_dir: Path) -> Iterator[None]:
    """Have the folder inside; where that fails, remove what was made for it and is empty."""
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def clear_results(run_dir: Path) -> None:
    """Delete what a run has written into `run_dir`, and nothing else."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    for name in _RECORDS:
        (run_dir / name).unlink(missing_ok=True)


def _free_name(run_dir: Path) -> Path:
    number = 2
    while (free := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return free
