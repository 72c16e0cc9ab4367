"""The step of a running process, for another process that may outlive it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from ..hook import Hook
from ..state import LoopState

_BYTES = 8


class NoteStepHook(Hook):
    """Keeps the number of the last complete update in a file, up to date even after a SIGKILL."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._number = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    def on_train_start(self, state: LoopState) -> None:
        self._number[0] = state.step + 1

    def on_update(self, state: LoopState) -> None:
        self._number[0] = state.step + 1

    @staticmethod
    def read(path: Path) -> int:
        """Return the step that a process noted; -1 if it did not get as far as training."""
        return int.from_bytes(path.read_bytes(), sys.byteorder) - 1 if path.exists() else -1
