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

from ...primitives.stop_signals import COUNT_AS_SIGTERM, ignore

# The server itself ignores SIGINT.
_IGNORED = (signal.SIGTERM, *COUNT_AS_SIGTERM)


def preload_this_module() -> None:
    """Make the fork server import this module when it starts; a running one is not changed."""
    # multiprocessing can set the list of modules, but not read it.
    server: object = getattr(forkserver, "_forkserver", None)
    modules: list[str] = getattr(server, "_preload_modules", ["__main__"])
    if __name__ not in modules:
        multiprocessing.set_forkserver_preload([*modules, __name__])


def _ignore_stop_signals_in_this_process() -> None:
    before = {number: signal.signal(number, ignore) for number in _IGNORED}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


# The server is ``python -c "from multiprocessing.forkserver import main; ..."``.
if any(word.startswith("from multiprocessing.forkserver import") for word in sys.orig_argv):
    _ignore_stop_signals_in_this_process()
