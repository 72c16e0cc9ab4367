"""What a run folder holds, and whether another run may use it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from ..collectives import broadcast, get_rank
from ..loops import CheckpointError, Hook, LoopState, find_checkpoint
from ..registry import Config, did_you_mean, dump_config, source_folders

logger = logging.getLogger(__name__)

_RECORDS = ("metrics.jsonl", "metrics.csv", "curves.png", "config.yaml")
_LOCK = "run.lock"
# Attempts to get the lock: a process that checks who holds it has it for a moment.
_TRIES, _PAUSE_S = 5, 0.05


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of `run_dir`, which is made; every rank must enter.

    Rank 0 holds a lock of the operating system on the file `run.lock` in it, which ends with its
    process, however that ends. The file says who has it.

    Raises:
        BlockingIOError: Another run has it; says which. On every rank.
        OSError: The folder or the file cannot be made. On every rank.
    """
    with ExitStack() as stack:
        problem: OSError | None = None
        if get_rank() == 0:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(run_dir / _LOCK))
            except OSError as error:
                problem = error
        problem = broadcast(problem)
        if problem is not None:
            raise problem
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have a locked file that names its owner; nothing is left of it."""
    for attempt in range(_TRIES):
        time.sleep(_PAUSE_S if attempt else 0.0)
        file = path.open("a+")
        if _lock(file.fileno(), fcntl.LOCK_EX) and _is_at(file, path):
            break
        file.close()
    else:
        raise BlockingIOError(f"{path.parent} is in use by {_owner(path)}")
    # A process forked from this one may outlive it, and must not have the lock then.
    os.register_at_fork(after_in_child=file.close)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
    file.flush()
    try:
        yield
    finally:
        if _is_at(file, path):
            path.unlink()
        file.close()


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file still is the one at the path, not one that was removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, kind: int) -> bool:
    """Lock an open file unless another process has locked it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "the file system has no locks (%s): nothing keeps a second run out of the folder",
            error.strerror,
        )
    return True


def _owner(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # Not written yet.
        return "another process"


class ConfigWriter(Hook):
    """Writes the run's settings into its folder as `config.yaml`.

    When training starts: a resume that fails leaves the settings of the run as they were.
    """

    order = 0

    def __init__(self, config: Config) -> None:
        self._config = config

    def on_train_start(self, state: LoopState) -> None:
        if state.run_dir is not None and get_rank() == 0:
            settings = {"resume": False, "import_from": source_folders(self._config)}
            state.run_dir.mkdir(parents=True, exist_ok=True)
            draft = state.run_dir / "config.yaml.tmp"
            dump_config({**self._config.to_dict(), **settings}, draft)
            draft.replace(state.run_dir / "config.yaml")


def in_use(run_dir: Path) -> str:
    """Return why no run may use `run_dir`: another one is running; "" if none is."""
    try:
        with (run_dir / _LOCK).open() as file:
            if _lock(file.fileno(), fcntl.LOCK_SH):
                return ""
    except OSError:
        return ""
    what = f"{run_dir} is in use by {_owner(run_dir / _LOCK)}; wait for its end"
    return f"{what}, or start another run with --run-dir {_free_name(run_dir)}"


def occupied(run_dir: Path) -> str:
    """Return why no new run may use `run_dir`: an earlier one left results; "" if none did."""
    checkpoints = saved_checkpoints(run_dir)
    records = run_dir / "metrics.jsonl"
    if checkpoints:
        holds = f"{len(checkpoints)} checkpoint(s), the last {checkpoints[-1].name}"
    elif records.exists() and records.stat().st_size:
        holds = "the records of a run without checkpoints"
    else:
        return ""
    return (
        f"{run_dir} already holds {holds}; continue that run with --resume, start another one "
        f"with --run-dir {_free_name(run_dir)}, or delete its results with --fresh"
    )


def stamped(run_dir: Path, prefix: str = "step_") -> dict[Path, int]:
    """Return the checkpoints in `run_dir` whose names begin so, the last one last, with times."""
    times: dict[Path, int] = {}
    for path in (run_dir / "checkpoints").glob(f"{prefix}*"):
        # A run may be removing it.
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    return dict(sorted(times.items(), key=lambda one: one[1]))


def saved_checkpoints(run_dir: Path, prefix: str = "step_") -> list[Path]:
    """Return the checkpoints in `run_dir` whose names begin so, the last one last."""
    return list(stamped(run_dir, prefix))


def resolve_checkpoint(run_dir: Path, which: str = "") -> Path:
    """Return the checkpoint that `which` names; every rank must call this.

    Args:
        run_dir: The run's folder.
        which: "best" or "latest" of it, the path of a checkpoint or of another run's folder;
            by default the best, else the latest.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(which)
    if which in ("", "best", "latest"):
        found = None if which == "latest" else find_checkpoint(run_dir, "best")
        if found is None and which != "best":
            found = find_checkpoint(run_dir, "latest")
        if found is not None:
            return found
        kind = f"{which} checkpoint" if which else "checkpoint"
        raise CheckpointError(
            f"there is no {kind} in {run_dir}: train first, or name one by its path"
        )
    if (path / "checkpoints").is_dir():
        return resolve_checkpoint(path, "latest")
    if path.exists():
        return path
    folder = path.parent if path.parent.is_dir() else run_dir / "checkpoints"
    there = [str(folder / one.name) for one in sorted(folder.glob("step_*"))]
    near = did_you_mean(str(path), there) or did_you_mean(str(path), ("best", "latest"))
    raise CheckpointError(f"there is no checkpoint {path}{near}")


def clear_results(run_dir: Path) -> None:
    """Delete what a run has written into `run_dir`, and nothing else."""
    for name in ("checkpoints", "ledger"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in _RECORDS:
        (run_dir / name).unlink(missing_ok=True)


def _free_name(run_dir: Path) -> Path:
    # A name such as "." has no last part to add a number to.
    run_dir = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
    number = 2
    while (free := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return free
