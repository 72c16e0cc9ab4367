"""Build the parts of a run, run its loops and launch its ranks; also the command line.

Importing this package does not import torch, so that the command line answers quickly. The public
names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import Export, ExportError, export_adapter, export_model
    from .failure import LaunchError
    from .launcher import launch
    from .pretrained.adapter import Adapter, add_adapter
    from .pretrained.load import load_weights
    from .runner import Runner, load_model

__all__ = [
    "Adapter",
    "Export",
    "ExportError",
    "LaunchError",
    "Runner",
    "add_adapter",
    "export_adapter",
    "export_model",
    "launch",
    "load_model",
    "load_weights",
]

_HOMES = {
    "Adapter": "pretrained.adapter",
    "Export": "export",
    "ExportError": "export",
    "LaunchError": "failure",
    "Runner": "runner",
    "add_adapter": "pretrained.adapter",
    "export_adapter": "export",
    "export_model": "export",
    "launch": "launcher",
    "load_model": "runner",
    "load_weights": "pretrained.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
