"""End a started process together with its parent.

`guard.with_parent_watched` runs this file by its path, before anything else in a new process:
it must import nothing but the standard library.
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
    """Make this process die when its launcher, process `parent`, does; also leave its group.

    A terminal sends Ctrl-C to a whole process group: outside it a rank gets it once, from the
    launcher. Stop signals wait until `heed_signals`.
    """
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        # Ignoring a signal discards what the group received while this process was starting.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # For other systems, and for a parent that died before the call above.
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
