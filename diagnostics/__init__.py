"""Tools that examine runs: the ledger, ``stepwrap bisect``, ``replay`` and ``verify-resume``.

A ledger is a file of hashes of each step of a run; comparing two ledgers shows the first difference
between runs. The tools are hooks and commands (entry-point group ``stepwrap.commands``). This
folder may import all others, but none of them imports it: its hooks are found by name in a
registry, and its commands by their entry points. Start reading in commands.py. Torch is imported
lazily, so that the command line starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ledger import Difference, Ledger, LedgerError, first_difference, read_ledger
    from .ledger_hook import LedgerHook

__all__ = ["Difference", "Ledger", "LedgerError", "LedgerHook", "first_difference", "read_ledger"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "ledger_hook" if name == "LedgerHook" else "ledger"
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
