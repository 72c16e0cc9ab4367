"""Count the operations that wait for a CUDA device, real or pretended; a group of one rank."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The text of torch's warning for such an operation.
_WAITS = "called a synchronizing CUDA operation"


@contextmanager
def counting_waits() -> Iterator[list[str]]:
    """Return a list that gets a text for each wait inside this context, with the line that waits.

    On a real device these are the waits that torch's sync debug mode notices. It does not notice
    `torch.cuda.synchronize` and waits for events.
    """
    if "PRETEND_CUDA" in os.environ:
        from pretend_devices import recording_work

        with recording_work() as work:
            yield work.waits
        return
    waits: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, *args: Any, **options: Any) -> None:
            if _WAITS in str(message):
                waits.append(_calling_line())
            else:
                show(message, *args, **options)

        warnings.showwarning = note
        warnings.filterwarnings("always", message=_WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _calling_line() -> str:
    """Return file and line of the innermost frame outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename not in (__file__, warnings.__file__):
            return f"{frame.filename}:{frame.lineno}"
    return "C++"


@contextmanager
def single_rank_group(folder: Path) -> Iterator[None]:
    """Let this process be the only rank of a group with NCCL."""
    store = dist.FileStore(str(folder / "store"), 1)
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()
