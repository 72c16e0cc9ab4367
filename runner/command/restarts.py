"""Restart a training from its last checkpoint, on all ranks, after one rank failed."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ...loops import NoteStepHook, find_checkpoint
from ..failure import LaunchError
from ..jobs import Job, Outcome, next_attempt, on_ranks, run_job
from ..run_folder import checkpoint_times

# The training is not restarted after this many equal errors at the same step.
_MAX_EQUAL_FAILURES = 3


def run_with_restarts(job: Job) -> dict[int, Outcome]:
    """Run a training on its ranks; restart it up to ``launch.max_restarts`` times.

    Raises:
        LaunchError: the last failure, if no restart is left, if the same error occurred at the
            same step for the third time, if the config has a mistake, or if the command had been
            asked to stop.
    """
    max_restarts, folder = job.run.launch.max_restarts, Path(job.run.run_dir)
    before = checkpoint_times(folder)
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
                if error.signal or cause.kind == "ConfigError":
                    raise
                when = f"after step {step}" if step >= 0 else "before the training began"
                _print(f"rank {cause.rank} failed {when}: {cause.kind}: {cause.message}")
                end = ""
                if failed[cause.kind, cause.message, step] == _MAX_EQUAL_FAILURES:
                    end = f"the same error at the same step {_MAX_EQUAL_FAILURES} times"
                elif count == max_restarts:
                    end = f"no restarts are left (launch.max_restarts is {max_restarts})"
                if end:
                    _print(f"not restarted: {end}")
                    raise
            has_saved = checkpoint_times(folder).items() - before.items()
            job = next_attempt(job, has_saved=bool(has_saved))
            source = find_checkpoint(folder) if has_saved else job.resume
            nproc = job.run.launch.nproc
            ranks = "the only rank" if nproc == 1 else f"all {nproc} ranks"
            remaining = f"{max_restarts - count - 1} of {max_restarts} restarts left"
            _print(f"restarting {ranks} from {source or 'the beginning'}; {remaining}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
