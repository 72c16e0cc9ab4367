"""End a process when its parent dies.

``rank_processes.add_parent_watch`` runs this file by its path as the first code of a new process,
so it must import only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def die_with_parent(parent: int) -> None:
    """End this process when process ``parent``, its launcher, dies; also leave its process group.

    A terminal sends Ctrl-C to the whole process group. Outside the group a rank gets it once, from
    the launcher. Stop signals stay blocked until ``unblock_signals``.
    """
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        # A signal to the old group may be pending, because signals are blocked while this process
        # starts: SIG_IGN discards it.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Needed on other systems, and if the parent died before the call above.
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
