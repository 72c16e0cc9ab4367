"""The panel in a real terminal emulator, which rewraps its rows when it is resized."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]

PROGRAM = """
import os, time, torch, warnings
from torch import nn
from stepwrap.loops import EpochTrainLoop, Hook, ProgressHook, ThroughputHook, build_loader
from stepwrap.loops.hook import HookList
from stepwrap.loops.state import LoopState
from stepwrap.wrappers import OptimWrapper, SingleDevice, SupervisedModel

class Speak(Hook):
    def on_update(self, state):
        time.sleep(0.05)
        if state.step == 20:
            warnings.warn("a warning")
            os.write(1, b"from another process\\n")

model = SupervisedModel(nn.Linear(3, 1), nn.MSELoss())
optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(4000, 3), torch.ones(4000, 1))
state = LoopState(model=SingleDevice(model), optim_wrapper=optimizer)
loop = EpochTrainLoop(build_loader(data, batch_size=2), max_epochs=10, log_every_steps=2)
loop.run(state, HookList([ProgressHook(), ThroughputHook(), Speak()]))
"""


class Tmux:
    """A terminal emulator with one window."""

    def __init__(self, folder: Path) -> None:
        self._name = f"stepwrap{os.getpid()}"
        self.call(
            "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", "-c", folder, "sh"
        )

    def call(self, *words: str | Path) -> str:
        command = ["tmux", "-L", self._name, *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def rows(self, *, history: bool = False) -> list[str]:
        text = self.call("capture-pane", "-p", *(["-S", "-", "-J"] if history else []))
        return [row.rstrip() for row in text.splitlines()]

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        deadline_s = time.monotonic() + 120
        while not condition(rows := self.rows()):
            assert time.monotonic() < deadline_s, "\n".join(rows)
            time.sleep(0.05)
        return rows


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path)
    yield terminal
    terminal.call("kill-server")


def get_box(width: int) -> Callable[[list[str]], bool]:
    def is_whole(rows: list[str]) -> bool:
        tops, ends = ([row for row in rows if row.startswith(corner)] for corner in ("╭", "╰"))
        return [len(row) for row in (*tops, *ends)] == [width, width]

    return is_whole


def test_resizing_and_interrupting_a_run(tmux: Tmux, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    tmux.call("send-keys", shlex.join([sys.executable, "program.py"]), "Enter")
    tmux.wait_for(get_box(99))
    # On a full screen a wrapped panel still fits.
    tmux.wait_for(lambda rows: rows[-1].startswith("╰"))
    tmux.wait_for(lambda rows: any("hook Speak limits the speed" in row for row in rows))
    tmux.call("resize-window", "-x", "70", "-y", "24")
    tmux.wait_for(get_box(69))
    tmux.call("resize-window", "-x", "50", "-y", "10")
    rows = tmux.wait_for(lambda rows: not any(set("╭│╰") & set(row) for row in rows))
    tmux.wait_for(lambda rows: [row for row in rows if row][-1].startswith("epoch 1/10 step "))
    tmux.call("resize-window", "-x", "80", "-y", "24")
    rows = tmux.wait_for(get_box(79))
    assert len([row for row in rows if row.startswith("│")]) == 5
    tmux.call("send-keys", "C-c")
    tmux.wait_for(lambda rows: any(row.startswith("stopped at step") for row in rows))
    log = tmux.rows(history=True)
    assert not [row for row in log if set("╭│╰━") & set(row)]
    assert len([row for row in log if row.startswith("epoch 1/10 step 20/20000 ")]) == 1
    assert len([row for row in log if row.endswith("UserWarning: a warning")]) == 1
    assert log.count("from another process") == 1
    assert len([row for row in log if re.match("stopping .*to save; .*Ctrl-C again ", row)]) == 1
