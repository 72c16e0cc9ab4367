"""Print the records of a run as lines; show a progress bar on a terminal or in a notebook."""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import sys
import uuid
from collections import deque
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import EVENTS, Hook
from ..state import LoopState, Phase

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# These values are formatted separately, at the end of the line.
_SPEED_KEYS = ("samples_per_s", "tokens_per_s", "mfu", "steps_per_s", "data_share")
_DATA_SHARE_SHOWN = 0.1
# Time constant: after this many seconds, a step's weight in the estimate has fallen to 1/e.
_MEMORY_S = 30.0
# The folder of a launch from a notebook, in which rank 0 leaves what the notebook is to display.
DISPLAY_DIR = "STEPWRAP_DISPLAY_DIR"
# The size of the display in a notebook.
_COLUMNS, _LINES = 100, 20
_HTML = '<pre style="white-space: pre-wrap; line-height: normal">{code}</pre>'


def train_line(state: LoopState, record: Mapping[str, float]) -> str:
    """Return ``epoch 2/10 step 150/500 loss 0.123 lr 0.001 1234 samples/s eta 0:01:20``."""
    return " ".join(
        [epoch_text(state), step_text(state), values_text(record), *_speed(state, record)]
    )


def eval_line(state: LoopState, metrics: Mapping[str, float]) -> str:
    """Return ``val epoch 2/10 step 150/500 accuracy 0.97``."""
    values = values_text(metrics) or ("cut short" if state.stop_reason else "done")
    return " ".join([state.phase.value, epoch_text(state), step_text(state), values])


def epoch_text(state: LoopState) -> str:
    """Return ``epoch 2/10``, which includes the running epoch."""
    total = "" if state.max_epochs is None else f"/{state.max_epochs}"
    return f"epoch {state.running_epoch}{total}"


def step_text(state: LoopState) -> str:
    """Return ``step 150/500``, in optimizer updates."""
    total = "" if state.max_steps is None else f"/{state.max_steps}"
    return f"step {state.step}{total}"


def values_text(values: Mapping[str, float]) -> str:
    """Return ``loss 0.123 lr 0.001``, without speeds and with only the highest learning rate."""
    shown: dict[str, float] = {}
    for name, value in values.items():
        if name.startswith("lr/"):
            shown["lr"] = max(value, shown.get("lr", value))
        elif name not in _SPEED_KEYS:
            shown[name] = value
    return " ".join(f"{name} {value:.4g}" for name, value in shown.items())


def _rates_text(record: Mapping[str, float]) -> list[str]:
    """Return ``1234 samples/s``, ``12345 tokens/s``, ``41% MFU`` if known, without exponents."""
    rates = [(name, record.get(f"{name}_per_s")) for name in ("samples", "tokens")]
    known = [(name, rate) for name, rate in rates if rate is not None]
    words = [f"{rate:{'.0f' if rate >= 1000 else '.4g'}} {name}/s" for name, rate in known]
    return [*words, f"{record['mfu']:.0%} MFU"] if "mfu" in record else words


def _speed(state: LoopState, record: Mapping[str, float]) -> list[str]:
    words = _rates_text(record)
    if record.get("data_share", 0.0) > _DATA_SHARE_SHOWN:
        words.append(f"({record['data_share']:.0%} waiting for data)")
    steps_per_s = record.get("steps_per_s", 0.0)
    if state.max_steps is not None and steps_per_s > 0:
        left_s = round(max(0, state.max_steps - state.step) / steps_per_s)
        words.append(f"eta {timedelta(seconds=left_s)}")
    return words


class _TimeLeft:
    """Estimate the remaining time of the training from its recent speed, without evaluations."""

    def __init__(self, step: int) -> None:
        self._step, self._since_s = step, perf_counter()
        self._steps = self._seconds = 0.0

    def resume(self) -> None:
        """Ignore the time since the last call of ``text``."""
        self._since_s = perf_counter()

    def text(self, state: LoopState) -> str:
        """Return ``eta 0:01:20``; empty before the first step, or without a known end."""
        if state.step > self._step:
            now = perf_counter()
            elapsed_s = now - self._since_s
            decay = math.exp(-elapsed_s / _MEMORY_S)
            self._steps = self._steps * decay + state.step - self._step
            self._seconds = self._seconds * decay + elapsed_s
            self._step, self._since_s = state.step, now
        if state.max_steps is None or not self._steps:
            return ""
        left_s = (state.max_steps - state.step) * self._seconds / self._steps
        return f"eta {timedelta(seconds=round(max(0.0, left_s)))}"


class _Bar:
    """A progress bar below lines of text; subclasses draw it."""

    def __init__(self, console: Console | None = None) -> None:
        # Imported lazily: only runs with a bar need it.
        from rich.progress import BarColumn, Progress, TextColumn

        # A refreshing thread would compete with the training loop for the interpreter.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[eta]}"),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._train: TaskID | None = None
        self._eval: TaskID | None = None

    def advance(self, state: LoopState, eta: str) -> None:
        place: dict[str, Any] = {
            "description": epoch_text(state),
            "completed": state.step,
            "count": step_text(state),
            "eta": eta,
        }
        if self._train is None:
            self._train = self._progress.add_task(total=state.max_steps, **place)
        else:
            self._progress.update(self._train, **place)

    def start_eval(self, state: LoopState) -> None:
        verb = "testing" if state.phase is Phase.TEST else "validating"
        self._eval = self._progress.add_task(verb, total=None, count="", eta="")

    def advance_eval(self, batches: int) -> None:
        if self._eval is not None:
            self._progress.update(self._eval, count=f"batch {batches}")

    def end_eval(self) -> None:
        if self._eval is not None:
            self._progress.remove_task(self._eval)
            self._eval = None

    def say(self, line: str) -> None:
        """Show a line above the bar, the next time it is drawn."""
        raise NotImplementedError

    def draw(self) -> None:
        """Show the new lines and the present state of the bar."""
        raise NotImplementedError

    def close(self) -> None:
        """Draw a last time."""
        self.draw()


class _TerminalBar(_Bar):
    """A bar that stays on the last lines of a terminal. Drawing takes about half a millisecond."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__(Console(file=sys.stdout))
        self._lines: list[str] = []
        self._progress.start()
        # Shows the cursor again after errors that hooks are not notified of.
        atexit.register(self._progress.stop)

    def say(self, line: str) -> None:
        self._lines.append(line)

    def draw(self) -> None:
        if self._lines:
            text = "\n".join(self._lines)
            self._lines.clear()
            self._progress.console.print(text, markup=False, highlight=False)
        self._progress.refresh()

    def close(self) -> None:
        super().close()
        self._progress.stop()
        atexit.unregister(self._progress.stop)


class _NotebookBar(_Bar):
    """A display below a notebook's cell, with the latest lines and the bar, updated in place.

    On a rank that a notebook launched, each drawing replaces a file that ``show_displays`` reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._name = uuid.uuid4().hex
        folder = os.environ.get(DISPLAY_DIR)
        self._path = None if folder is None else Path(folder) / f"{time_ns()}.display"
        self._is_new = True

    def say(self, line: str) -> None:
        self._lines.append(line)

    def draw(self) -> None:
        data = self._rendered()
        if self._path is None:
            _display(data, self._name, is_new=self._is_new)
            self._is_new = False
            return
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({"name": self._name, "data": data}))
        draft.replace(self._path)

    def _rendered(self) -> dict[str, str]:
        from rich.console import Console

        # Records what it prints, with the colours of a terminal, in any process.
        console = Console(
            file=io.StringIO(),
            record=True,
            width=_COLUMNS,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
        )
        if self._lines:
            console.print("\n".join(self._lines), markup=False, highlight=False, soft_wrap=True)
        console.print(self._progress.get_renderable())
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/plain": console.export_text().rstrip(), "text/html": html}


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def show_displays(folder: Path) -> None:
    """Show in this notebook what rank 0 has left in ``folder`` since the last call."""
    for path in sorted(folder.glob("*.display")):
        taken = path.with_suffix(".taken")
        is_new = not taken.exists()
        # Rank 0 may replace the file at any time, so read it under another name.
        path.replace(taken)
        _display(**json.loads(taken.read_text()), is_new=is_new)


def _display(data: dict[str, str], name: str, *, is_new: bool) -> None:
    from IPython.display import display, update_display

    show = display if is_new else update_display
    show(data, raw=True, display_id=name)  # type: ignore[no-untyped-call]


def _bar_kind() -> type[_TerminalBar] | type[_NotebookBar] | None:
    """Return the bar for the place where the output of this process is shown; None for a file."""
    if in_notebook() or DISPLAY_DIR in os.environ:
        return _NotebookBar
    # A dumb terminal, such as an editor's shell, cannot move its cursor.
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return _TerminalBar if sys.stdout.isatty() and not is_dumb else None


@HOOKS.register_module()
class ProgressHook(Hook):
    """Print a line for each log record and evaluation; on a terminal, also show a progress bar.

    Writes to the standard output of rank 0; the other ranks print nothing. In a notebook, the bar
    and the last 20 lines are one display below the cell, updated in place, also for the ranks that
    ``launch`` starts there. ``LogHook`` writes all records into files.

    Args:
        refresh_s: Seconds between two drawings of the bar, more than 0.

    Raises:
        ValueError: ``refresh_s`` is not more than 0.
    """

    order = 80

    def __init__(self, *, refresh_s: float = 0.2) -> None:
        if not refresh_s > 0:
            raise ValueError(f"refresh_s must be > 0, got {refresh_s!r}")
        self._refresh_s = refresh_s
        self._bar: _Bar | None = None
        # None outside of training.
        self._time_left: _TimeLeft | None = None
        self._eval_batches = 0
        self._due_s = math.inf
        self._log_due_s = 0.0

    def ignores(self) -> Collection[str]:
        """Ignore all events on ranks other than 0, and updates of the bar if there is none."""
        if get_rank() != 0:
            return EVENTS
        return () if _bar_kind() else ("on_update", "on_eval_batch_end")

    def on_train_start(self, state: LoopState) -> None:
        self._time_left = _TimeLeft(state.step)
        self._open()
        self._refresh(state)

    def on_update(self, state: LoopState) -> None:
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        self._say(train_line(state, record))
        # Not `_due_s`: `on_update` may just have drawn the bar, and the line of this record would
        # then wait for the next update, which may be slow.
        if perf_counter() >= self._log_due_s:
            self._refresh(state)
            self._log_due_s = self._due_s

    def on_eval_start(self, state: LoopState) -> None:
        self._open()
        self._eval_batches = 0
        if self._bar is not None:
            self._bar.start_eval(state)
        self._refresh(state)

    def on_eval_batch_end(self, state: LoopState, batch: Any, outputs: Any) -> None:
        self._eval_batches += 1
        if perf_counter() >= self._due_s:
            self._refresh(state)

    def on_eval_end(self, state: LoopState, metrics: dict[str, float]) -> None:
        if self._bar is not None:
            self._bar.end_eval()
        self._say(eval_line(state, metrics))
        self._refresh(state)
        if self._time_left is None:
            self._close()
        else:
            self._time_left.resume()

    def on_train_end(self, state: LoopState) -> None:
        self._refresh(state)
        if state.stop_reason:
            self._say(f"stopped at step {state.step}: {state.stop_reason}")
        self._close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._close()

    def _open(self) -> None:
        kind = _bar_kind()
        if self._bar is None and kind is not None:
            self._bar, self._due_s = kind(), 0.0

    def _close(self) -> None:
        self._time_left = None
        if self._bar is not None:
            self._bar.close()
            self._bar, self._due_s = None, math.inf

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.say(line)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _refresh(self, state: LoopState) -> None:
        if self._bar is not None:
            if self._time_left is not None:
                self._bar.advance(state, self._time_left.text(state))
            self._bar.advance_eval(self._eval_batches)
            self._bar.draw()
            self._due_s = perf_counter() + self._refresh_s
