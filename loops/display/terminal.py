"""Show the panel on a terminal, below the output of the run."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from threading import RLock
from typing import Any, TextIO

from .panel import Progress, render

# Moves to the start of the row and erases everything from there on.
_ERASE = "\r\x1b[J"


class TerminalDisplay:
    """A panel below the lines of a run, on the terminal of the standard output.

    After each drawing the cursor is in the empty row above the panel, and each drawing first erases
    everything below the cursor. So lines of other processes are not lost, and no part of an old
    panel remains if the terminal wraps its rows because it has become narrower. The cursor is never
    hidden, so even a killed run leaves a usable terminal.

    Until ``close``, output of this process to the terminal appears above the panel, line by line:
    through ``sys.stdout``, ``sys.stderr`` and handlers of ``logging``.
    """

    def __init__(self) -> None:
        # Imported lazily: only runs on a terminal need it.
        from rich.console import Console

        self._out = sys.stdout
        self._console = Console(file=self._out)
        self._lines: list[str] = []
        self._progress: Progress | None = None
        self._frame, self._frame_size = "", (0, 0)
        self._lock = RLock()
        self._pid = os.getpid()
        self._above = {id(s): _Above(self, s) for s in (sys.stdout, sys.stderr) if s.isatty()}
        self._replaced = list(_replace_streams(self._above))
        # Some errors end the program without a call of `on_exception`.
        atexit.register(self.close)

    def say(self, line: str) -> None:
        """Show a line above the panel, the next time it is drawn."""
        self._lines.append(line)

    def draw(self, progress: Progress) -> None:
        """Show the new lines and the panel."""
        self._progress, self._frame_size = progress, (0, 0)
        self.show()

    def show(self) -> None:
        """Show the new lines above the last panel, which is rendered again after a resize."""
        with self._lock:
            size = self._size()
            if size != self._frame_size and self._progress is not None:
                self._frame, self._frame_size = self._render(self._progress, *size), size
            lines, self._lines = self._lines, []
            self._out.write("".join([_ERASE, *(f"{line}\n" for line in lines), self._frame]))
            self._out.flush()

    def close(self) -> None:
        """Erase the panel and restore the streams; the lines remain."""
        atexit.unregister(self.close)
        if not self.is_open():
            return
        for owner, name, stream in self._replaced:
            # Another redirection that began later may still be active.
            if isinstance(getattr(owner, name), _Above):
                setattr(owner, name, stream)
        self._replaced = []
        self._lines += [above.rest for above in self._above.values() if above.rest]
        self._progress, self._frame = None, ""
        self.show()

    def is_open(self) -> bool:
        """Return whether this process shows the panel; forked processes do not."""
        return bool(self._replaced) and os.getpid() == self._pid

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._out.fileno())
        except OSError:
            columns = rows = 0
        # A terminal whose size was never set has 0 columns.
        return columns or 80, rows or 24

    def _render(self, progress: Progress, columns: int, rows: int) -> str:
        # Some terminals start a new row after the last column.
        self._console.width = max(1, columns - 1)
        with self._console.capture() as capture:
            self._console.print(render(progress, columns, rows))
        panel = capture.get().rstrip("\n").split("\n")[: max(1, rows - 2)]
        return "\n".join(["", *panel]) + f"\r\x1b[{len(panel)}A"


class _Above:
    """A stream that shows lines above the panel, or writes to ``stream`` if no panel is shown."""

    def __init__(self, display: TerminalDisplay, stream: TextIO) -> None:
        self._display, self._stream = display, stream
        self.rest = ""

    def write(self, text: str) -> int:
        if not self._display.is_open():
            return self._stream.write(text)
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            # Progress bars rewrite a line after a carriage return: show the last version.
            self._display.say(line.rstrip("\r").rpartition("\r")[2])
        if lines:
            self._display.show()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _replace_streams(above: dict[int, _Above]) -> Iterator[tuple[Any, str, TextIO]]:
    """Replace streams in ``sys`` and in handlers; yield each owner, its attribute and the stream.

    Args:
        above: the new streams by the ``id`` of the old ones.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = (handler for logger in loggers for handler in getattr(logger, "handlers", ()))
    streams = (
        (handler, "stream") for handler in handlers if isinstance(handler, logging.StreamHandler)
    )
    for owner, name in [(sys, "stdout"), (sys, "stderr"), *streams]:
        stream = getattr(owner, name)
        if id(stream) in above:
            setattr(owner, name, above[id(stream)])
            yield owner, name, stream
