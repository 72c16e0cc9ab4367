"""Build the parts of a run, run its loops and launch its ranks; also the command line.

Importing this package does not import torch, so that the command line answers quickly. The public
names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .failure import LaunchError
    from .launcher import launch
    from .runner import Runner, load_model

__all__ = ["LaunchError", "Runner", "launch", "load_model"]

_HOMES = {
    "LaunchError": "failure",
    "Runner": "runner",
    "launch": "launcher",
    "load_model": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
