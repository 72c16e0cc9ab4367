"""Restart a training from its last checkpoint, on all ranks, after one rank failed."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ...loops import NoteStepHook, find_checkpoint
from ...registry import Config, RunSections
from ...registry.local_paths import local_path
from ..failure import LaunchError
from ..jobs import Outcome, launch_ranks, next_attempt, train_on_rank
from ..run_folder import checkpoint_times

# The training is not restarted after this many equal errors at the same step.
_MAX_EQUAL_FAILURES = 3


def train_with_restarts(
    config: Config, run: RunSections, *, resume: bool | str | Path, fresh: bool, debug: bool
) -> dict[int, Outcome]:
    """Run a training on its ranks; restart it up to ``launch.max_restarts`` times.

    The arguments are the same as for ``train_on_rank``.

    Raises:
        LaunchError: the last failure, if no restart is left, if the same error occurred at the
            same step for the third time, if the config has a mistake, or if the command had been
            asked to stop.
    """
    max_restarts, folder = run.launch.max_restarts, local_path(run.run_dir)
    before = checkpoint_times(folder)
    train = partial(train_on_rank, config, run, debug=debug)
    failed: Counter[tuple[str, str, int]] = Counter()
    with TemporaryDirectory(prefix="stepwrap_steps_", ignore_cleanup_errors=True) as steps_folder:
        while True:
            count = failed.total()
            steps = Path(steps_folder, str(count))
            steps.mkdir()
            attempt = partial(train, resume=resume, fresh=fresh, steps=str(steps))
            try:
                variables = {"TORCHELASTIC_RESTART_COUNT": str(count)}
                return launch_ranks(run, attempt, environment=variables)
            except LaunchError as error:
                cause = error.failures[0]
                step = NoteStepHook.read(steps / str(cause.rank))
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
            resume, fresh = next_attempt(resume, fresh, has_saved=bool(has_saved))
            source = find_checkpoint(folder) if has_saved else resume
            nproc = run.launch.nproc
            ranks = "the only rank" if nproc == 1 else f"all {nproc} ranks"
            remaining = f"{max_restarts - count - 1} of {max_restarts} restarts left"
            _print(f"restarting {ranks} from {source or 'the beginning'}; {remaining}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
