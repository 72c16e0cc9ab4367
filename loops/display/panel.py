"""The panel that shows the progress of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

# In smaller terminals the panel is a single line.
_COLUMNS, _ROWS = 60, 12


@dataclass
class Progress:
    """The content of the panel, as texts; those that are not known yet are empty.

    Attributes:
        title: the name of the run.
        epoch: the running epoch; like the other entries about training, empty outside of it.
        step: the current update.
        completed: finished updates.
        total: the number of updates; None if unknown.
        eta: the remaining time.
        values: the values of the last log record.
        metric: the last and the best value of the main metric.
        evaluation: the position in the running evaluation.
        speed: speed and memory.
        limits: causes that limit the speed, one sentence each.
    """

    title: str = ""
    epoch: str = ""
    step: str = ""
    completed: int = 0
    total: int | None = None
    eta: str = ""
    values: str = ""
    metric: str = ""
    evaluation: str = ""
    speed: str = ""
    limits: Sequence[str] = ()

    @property
    def percent(self) -> str:
        """The finished part, such as ``22%``; empty if the total is unknown."""
        return f"{self.completed / self.total:.0%}" if self.total else ""


def render(progress: Progress, columns: int, rows: int) -> RenderableType:
    """Return the panel for a terminal of this size: a box, or a single line if it is small."""
    # Imported lazily: only runs with a panel need it.
    from rich.box import ROUNDED
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    p = progress
    if columns < _COLUMNS or rows < _ROWS:
        words = [p.evaluation, p.epoch, p.step, p.percent, p.eta, p.values]
        line = Text(" ".join(filter(None, words)), no_wrap=True, overflow="ellipsis")
        # Printed alone, it would lose these settings.
        return Group(line)
    content = Group(
        _head(p),
        Text(p.values, no_wrap=True, overflow="ellipsis"),
        Text("  ".join(filter(None, [p.metric, p.evaluation]))),
        Text(p.speed),
        *(Text(limit, style="yellow") for limit in p.limits),
    )
    return Panel(content, box=ROUNDED, title=Text(p.title), border_style="dim")


def _head(p: Progress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    words = " ".join(filter(None, [p.step, p.percent, p.eta]))
    if p.total is None:
        return f"{p.epoch} {words}"
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    head.add_row(p.epoch, ProgressBar(p.total, p.completed), words)
    return head
