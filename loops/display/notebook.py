"""Show the panel below a notebook's cell, also for the ranks that a notebook launches."""

from __future__ import annotations

import io
import json
import os
import sys
import uuid
from collections import deque
from pathlib import Path
from time import time_ns

from ...primitives.files import replacing
from .panel import Progress, render

# The variable with the folder into which rank 0 of a launch writes drawings for the notebook.
DISPLAY_DIR = "STEPWRAP_DISPLAY_DIR"
# The size of the display.
_COLUMNS, _LINES = 100, 20
_HTML = '<pre style="white-space: pre-wrap; line-height: normal">{code}</pre>'


class NotebookDisplay:
    """A display below a notebook's cell, with the latest lines and the panel, updated in place.

    On a rank that a notebook launched, each drawing replaces a file that ``show_displays`` reads.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._progress: Progress | None = None
        self._name = uuid.uuid4().hex
        folder = os.environ.get(DISPLAY_DIR)
        self._path = None if folder is None else Path(folder) / f"{time_ns()}.display"
        self._is_new = True

    def say(self, line: str) -> None:
        """Show a line above the panel, the next time it is drawn."""
        self._lines.append(line)

    def draw(self, progress: Progress) -> None:
        """Show the new lines and the panel."""
        self._progress = progress
        self._show()

    def close(self) -> None:
        """Show the last lines without the panel."""
        self._progress = None
        self._show()

    def _show(self) -> None:
        data = self._rendered()
        if self._path is None:
            _display(data, self._name, is_new=self._is_new)
            self._is_new = False
            return
        with replacing(self._path) as draft:
            draft.write_text(json.dumps({"name": self._name, "data": data}))

    def _rendered(self) -> dict[str, str]:
        from rich.console import Console

        # `record` keeps the output for the export, and `force_terminal` the colours in any process.
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
        if self._progress is not None:
            console.print(render(self._progress, _COLUMNS, _LINES))
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/plain": console.export_text().rstrip(), "text/html": html}


def is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def show_displays(folder: Path) -> None:
    """Show in this notebook what rank 0 has left in ``folder`` since the last call."""
    for path in sorted(folder.glob("*.display")):
        shown_path = path.with_suffix(".taken")
        is_new = not shown_path.exists()
        # Rank 0 may replace the file at any time, so read it under another name.
        path.replace(shown_path)
        _display(**json.loads(shown_path.read_text()), is_new=is_new)


def _display(data: dict[str, str], name: str, *, is_new: bool) -> None:
    from IPython.display import display, update_display

    show = display if is_new else update_display
    show(data, raw=True, display_id=name)  # type: ignore[no-untyped-call]
