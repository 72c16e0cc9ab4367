"""The files of a run folder, and the lock that keeps other runs out of it."""

from __future__ import annotations

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
from ..loops.loggers.logger import flat_settings
from ..primitives.files import is_locked, replacing, try_lock
from ..registry import Config, did_you_mean, dump_config, source_folders
from ..registry.local_paths import remote_url

logger = logging.getLogger(__name__)

_RECORDS = (
    *("metrics.jsonl", "metrics.csv", "curves.png", "config.yaml", "origins.json"),
    *("environment.json", "events.jsonl", "phases.json"),
)
_LOCK = "run.lock"
# A process that checks the lock takes it for a moment, so a new run retries.
_TRIES, _PAUSE_S = 5, 0.05


@contextmanager
def locked_run_dir(run_dir: Path) -> Iterator[None]:
    """Create ``run_dir`` and keep other runs out of it; every rank must enter.

    Rank 0 holds a lock of the operating system on the file ``run.lock``, which names its owner. The
    lock ends with the process.

    Raises:
        BlockingIOError: another run uses the folder; the message names its process. Raised on
            every rank.
        OSError: the folder or the file cannot be created. Raised on every rank.
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
    """Lock a file and write the name of its owner into it; delete it at the end."""
    for attempt in range(_TRIES):
        time.sleep(_PAUSE_S if attempt else 0.0)
        file = path.open("a+")
        if _lock(file.fileno()) and _is_at(file, path):
            break
        file.close()
    else:
        raise BlockingIOError(f"{path.parent} is in use by {_owner(path)}")
    # A forked process may outlive this one and must not keep the lock.
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
    """Return whether an open file is still the one at ``path``, not one that was deleted."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    """Try to lock an open file; return False if another process has locked it."""
    try:
        return try_lock(descriptor)
    except OSError as error:
        logger.warning(
            "the file system does not support locks (%s): a second run could use the same folder",
            error.strerror,
        )
    return True


def _owner(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        # The owner is still writing its name.
        return "another process"


class ConfigWriter(Hook):
    """Writes the run's settings to ``config.yaml``, and their origins, when training starts.

    A resume that fails earlier leaves the existing file unchanged.
    """

    order = 0

    def __init__(self, config: Config) -> None:
        self._config = config

    def on_train_start(self, state: LoopState) -> None:
        if state.run_dir is not None and get_rank() == 0:
            settings = {"resume": False, "import_from": source_folders(self._config)}
            state.run_dir.mkdir(parents=True, exist_ok=True)
            with replacing(state.run_dir / "config.yaml") as draft:
                dump_config({**self._config.to_dict(), **settings}, draft)
            self._write_origins(state.run_dir / "origins.json")

    def _write_origins(self, path: Path) -> None:
        """Write the file and line, or the override, of each setting, as JSON by key path."""
        config, before = self._config, {}
        origins = {key: config.origin(key) for key, _ in flat_settings(config.to_dict())}
        if config.path == (path.parent / "config.yaml").absolute():
            # The run continues from its own config, whose values keep their earlier origins.
            with suppress(OSError, ValueError):
                before = json.loads(path.read_text(encoding="utf-8"))
        for key in before.keys() & origins.keys():
            if not origins[key].startswith("override "):
                origins[key] = before[key]
        path.write_text(json.dumps(origins, indent=1), encoding="utf-8")


def is_in_use(run_dir: Path) -> str:
    """Return a message if another run is using ``run_dir``, otherwise ""."""
    if not is_locked(run_dir / _LOCK):
        return ""
    return (
        f"{run_dir} is in use by {_owner(run_dir / _LOCK)}; wait until it ends, or start another "
        f"run with --run-dir {_free_name(run_dir)}"
    )


def occupied(run_dir: Path) -> str:
    """Return a message if an earlier run left results in ``run_dir``, otherwise ""."""
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


def checkpoint_times(run_dir: Path, prefix: str = "step_") -> dict[Path, int]:
    """Map checkpoints whose names start with ``prefix`` to times of change (ns), oldest first."""
    times: dict[Path, int] = {}
    for path in (run_dir / "checkpoints").glob(f"{prefix}*"):
        # A run may be deleting it.
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


def saved_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints in ``run_dir``, oldest first."""
    return list(checkpoint_times(run_dir))


def resolve_checkpoint(
    run_dir: Path | None, which: str | os.PathLike[str] = "", *, of_other_run: str = ""
) -> Path:
    """Return the path of the checkpoint that ``which`` names; every rank must call this.

    Every command, setting and method that takes a checkpoint follows this rule:

    - "best" and "latest" are checkpoints in the run's folder.
    - Another text without a slash is the name of a checkpoint in the run's folder or, if there is
      none, the folder of another run. It never names a checkpoint in the current folder.
    - Any other text, and any ``Path``, is the path or URL of a checkpoint or of another run's
      folder.

    Args:
        run_dir: the run's folder; None if there is none, so that every text is a path.
        which: the checkpoint. Default: the best one if there is one, otherwise the latest.
        of_other_run: the checkpoint to take if ``which`` is the folder of another run: "best",
            "latest" or "".

    Raises:
        CheckpointError: the checkpoint does not exist.
    """
    if remote_url(which):
        # Imported here, because most runs have no URL.
        from .remote.copies import local_copy

        return _checkpoint_at(local_copy(which, of_other_run), of_other_run)
    path = Path(which)
    if run_dir is None or not isinstance(which, str) or path.name != which:
        return _checkpoint_at(path, of_other_run)
    if which in ("", "best", "latest"):
        return _searched(run_dir, which)
    if (checkpoint := run_dir / "checkpoints" / which).exists():
        return checkpoint
    if (path / "checkpoints").is_dir():
        return _searched(path, of_other_run)
    hint = did_you_mean(which, ["best", "latest", *_names_in(run_dir / "checkpoints")])
    if path.exists():
        hint = f"; for {path.absolute()}, which another run may have saved, write ./{which}"
    raise CheckpointError(f"checkpoint {which} does not exist in {run_dir}{hint}")


def _searched(run_dir: Path, which: str) -> Path:
    checkpoint = None if which == "latest" else find_checkpoint(run_dir, "best")
    if checkpoint is None and which != "best":
        checkpoint = find_checkpoint(run_dir, "latest")
    if checkpoint is None:
        kind = f"{which} checkpoint" if which else "checkpoint"
        raise CheckpointError(f"{run_dir} has no {kind}: train first, or give a checkpoint's path")
    return checkpoint


def _checkpoint_at(path: Path, of_run: str) -> Path:
    if (path / "checkpoints").is_dir():
        return _searched(path, of_run)
    if path.exists():
        return path
    neighbours = [str(path.with_name(name)) for name in _names_in(path.parent)]
    raise CheckpointError(f"checkpoint {path} does not exist{did_you_mean(str(path), neighbours)}")


def _names_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("step_*"))


def clear_results(run_dir: Path) -> None:
    """Delete the checkpoints, the ledger and the records in ``run_dir``; keep all other files."""
    for name in ("checkpoints", "ledger"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in _RECORDS:
        (run_dir / name).unlink(missing_ok=True)


def _free_name(run_dir: Path) -> Path:
    # A path such as "." has no last part to which a number could be added.
    run_dir = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
    number = 2
    while (free := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return free
