"""The bar of a call over many items."""

from __future__ import annotations


class Bar:
    """A bar on the terminal; any thread may move it.

    Args:
        name: what is shown before it.
        total: items; None where their number is not known.
    """

    def __init__(self, name: str, total: int | None) -> None:
        from rich.progress import Progress

        self._progress = Progress(transient=False)
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()

    def advance(self, items: int) -> None:
        """Move on by some items."""
        self._progress.advance(self._task, items)

    def stop(self) -> None:
        """Leave the bar as it is; a second time does nothing."""
        self._progress.stop()
