"""Show other processes the number of the last update, even after this process was killed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from ..hook import Hook
from ..state import LoopState

_BYTES = 8


class NoteStepHook(Hook):
    """Write the number of the last complete update to a file, which survives a SIGKILL."""

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
        """Return the step that a process wrote; -1 if it has not started training."""
        return int.from_bytes(path.read_bytes(), sys.byteorder) - 1 if path.exists() else -1
