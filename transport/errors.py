"""Errors that represent errors of other processes."""

from __future__ import annotations


class RemoteTraceback(Exception):
    """The traceback from another process or thread, as the ``__cause__`` of a task's error."""


class RemoteError(RuntimeError):
    """An error of a task that cannot be rebuilt in this process.

    Attributes:
        type_name: the full name of the error's class.
        message: the error's text.
        traceback: the traceback from the other process.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name
