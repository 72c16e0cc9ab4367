"""How processes are started, and what a forked one has to mind."""

from __future__ import annotations

import multiprocessing
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def default_context() -> Any:
    """Return multiprocessing's default context, or "spawn" in place of "fork".

    A forked process hangs at its first large operation on tensors once its parent has made one.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_context("spawn" if method == "fork" else method)


def use_one_thread() -> None:
    """Have torch, where a forked process has it from its parent, work with one thread.

    OpenMP waits for ever for those of the parent, which are not in this process.
    """
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)
