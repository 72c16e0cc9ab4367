"""Restart a training on all ranks when one of them has died, from its last checkpoint."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ...loops import NoteStepHook, find_checkpoint
from ..failure import LaunchError
from ..jobs import Job, Outcome, next_attempt, on_ranks, run_job
from ..run_folder import stamped

# A training that fails so often in the same way at the same step is not restarted.
_SAME = 3


def run_with_restarts(job: Job) -> dict[int, Outcome]:
    """Run a training on its ranks; restart it up to `launch.max_restarts` times.

    Raises:
        LaunchError: The last failure, if no restart is left, if the same error came at the same
            step for the third time, or if the command was to stop anyway.
    """
    most, folder = job.run.launch.max_restarts, Path(job.run.run_dir)
    before = stamped(folder)
    failed: Counter[tuple[str, str, int]] = Counter()
    with TemporaryDirectory(prefix="stepwrap_steps_", ignore_cleanup_errors=True) as steps:
        while True:
            count = failed.total()
            job = replace(job, steps=f"{steps}/{count}")
            Path(job.steps).mkdir()
            try:
                variables = {"TORCHELASTIC_RESTART_COUNT": str(count)}
                return on_ranks(job.run, run_job, (job,), environment=variables)
            except LaunchError as error:
                cause = error.failures[0]
                step = NoteStepHook.read(Path(job.steps, str(cause.rank)))
                failed[cause.kind, cause.message, step] += 1
                if error.is_stopping or cause.kind == "ConfigError":
                    raise
                when = f"after step {step}" if step >= 0 else "before the training began"
                _tell(f"rank {cause.rank} failed {when}: {cause.kind}: {cause.message}")
                end = ""
                if failed[cause.kind, cause.message, step] == _SAME:
                    end = f"the same error at the same step {_SAME} times"
                elif count == most:
                    end = f"no restart is left of {most} (launch.max_restarts)"
                if end:
                    _tell(f"not restarted: {end}")
                    raise
            has_saved = stamped(folder).items() - before.items()
            job = next_attempt(job, has_saved=bool(has_saved))
            source = find_checkpoint(folder) if has_saved else job.resume
            left = f"{most - count - 1} of {most} restarts left"
            _tell(f"restarting {_ranks(job)} from {source or 'the beginning'}; {left}")


def _ranks(job: Job) -> str:
    nproc = job.run.launch.nproc
    return "the only rank" if nproc == 1 else f"all {nproc} ranks"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
