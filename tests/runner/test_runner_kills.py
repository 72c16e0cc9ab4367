"""SIGKILL to each kind of process of a run, at random and in every phase of a save.

The run is then resumed, and must end with the weights and records of a run that was never killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import nightly, slow
from ranks import run_ranks
from runner_parts import Command, assert_identical, final_weights
from test_runner_stop import SLOW, TRAIN, timeless_records, train_here
from torch import Tensor

Start = Callable[..., Command]

# Pruned checkpoints belong to a save.
SETTINGS = (SLOW, "hooks.checkpoint.keep_last=2", "train.max_epochs=2", "schedulers.T_max=2")
VICTIMS = ("save", "rank", "launcher", "worker")
# A hook in the folder of the run, since the command does not know this file.
MODULE = '''
import functools
import os
import signal

from stepwrap.loops import Hook

CALLS = ("fsync", "rename", "mkdir", "rmdir", "unlink")


class KillInSave(Hook):
    """Kill a rank before one of the system's calls that change files.

    The calls are counted from the third update on, before its checkpoint is saved.
    """

    def __init__(self, rank, call):
        self.rank, self.calls_left = rank, call

    def on_update(self, state):
        if state.step == 3 and int(os.environ.get("RANK", "0")) == self.rank:
            for name in CALLS:
                setattr(os, name, functools.partial(self.count, getattr(os, name)))

    def count(self, call, *args, **options):
        if not self.calls_left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls_left -= 1
        return call(*args, **options)
'''


class Drill:
    """The kill with a number; the number decides everything but the speed of the machine."""

    def __init__(self, number: int) -> None:
        drawn = random.Random(number)
        self.nproc = 1 + number % 4
        self.victim = VICTIMS[number // 4 % len(VICTIMS)]
        wrapper = "single" if self.nproc == 1 else ("ddp", "fsdp")[number // 16 % 2]
        self.settings = (f"wrapper.type={wrapper}", *SETTINGS)
        self._rank = drawn.randrange(self.nproc)
        # Rank 0 makes about 15 calls for a checkpoint, and each other rank one.
        self._call = drawn.randrange(3 if self._rank else 40)
        self._delay_s = drawn.uniform(0, 0.4)

    def run(self, start: Start, folder: Path) -> None:
        words = list(self.settings)
        if self.victim == "save":
            (folder / "kills.py").write_text(MODULE)
            hook = f"{{type: kills.KillInSave, rank: {self._rank}, call: {self._call}}}"
            words += ["imports=[points.py, kills.py]", f"hooks.kill={hook}"]
        if self.victim == "worker":
            words.append("data.train.num_workers=1")
        command = start(*TRAIN, f"--nproc={self.nproc}", *words)
        if self.victim != "save":
            command.wait_for(folder / "run", 1)
            time.sleep(self._delay_s)
            self._kill(command)
        code, _, err = command.finish()
        assert command.wait_gone() == []
        # At a random time the run may have ended already.
        assert code or self.victim != "save"
        assert not code or code == -signal.SIGKILL or "killed by" in err, err

    def _kill(self, command: Command) -> None:
        process = command.process.pid
        if self.victim != "launcher":
            # The ranks may have ended.
            with contextlib.suppress(StopIteration):
                process = command.get_process(self._rank)
        if self.victim == "worker":
            children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            process = int(children[0]) if children else process
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


# Weights and records of runs that were not killed, by their number of ranks and settings.
_expected: dict[tuple[int, tuple[str, ...]], tuple[dict[str, Tensor], list[dict[str, Any]]]] = {}


def train_without_kill(drill: Drill, folder: Path) -> tuple[dict[str, Tensor], list[Any]]:
    key = drill.nproc, drill.settings
    if key not in _expected:
        run_ranks(train_here, drill.nproc, folder, "whole", False, *drill.settings)
        _expected[key] = final_weights(folder / "whole"), timeless_records(folder / "whole")
    return _expected[key]


@pytest.mark.parametrize(
    "number", [*slow(*range(0, 48, 7)), *nightly(*(n for n in range(200) if n % 7 or n >= 48))]
)
def test_a_killed_run_ends_like_one_that_was_not(start: Start, tmp_path: Path, number: int) -> None:
    drill = Drill(number)
    drill.run(start, tmp_path)
    run_ranks(train_here, drill.nproc, tmp_path, "run", True, *drill.settings)
    weights, records = train_without_kill(drill, tmp_path)
    assert_identical(final_weights(tmp_path / "run"), weights)
    trained = [r for r in timeless_records(tmp_path / "run") if r.get("phase") != "test"]
    assert trained == records
    folders = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert all(name.startswith(("step_", "incomplete_")) for name in folders), folders
