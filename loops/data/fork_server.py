"""Keep the fork server of multiprocessing alive when a scheduler signals every process of a job.

The workers of a ``DataLoader`` end when their parent process ends. With the start method
"forkserver" the parent is the server, which SIGTERM would end at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from types import FrameType

_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def preload_this_module() -> None:
    """Make the fork server import this module when it starts; a running one is not changed."""
    # multiprocessing can set the list of modules, but not read it.
    server: object = getattr(forkserver, "_forkserver", None)
    modules: list[str] = getattr(server, "_preload_modules", ["__main__"])
    if __name__ not in modules:
        multiprocessing.set_forkserver_preload([*modules, __name__])


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. SIG_IGN would be inherited by programs that the server's children start."""


def _ignore_stop_signals_in_this_process() -> None:
    before = {number: signal.signal(number, _ignore) for number in _IGNORED}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


# The server is ``python -c "from multiprocessing.forkserver import main; ..."``.
if any(word.startswith("from multiprocessing.forkserver import") for word in sys.orig_argv):
    _ignore_stop_signals_in_this_process()
