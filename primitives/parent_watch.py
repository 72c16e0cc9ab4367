"""End a process when its parent ends, however the parent ends.

Imports only the standard library: new processes run this file by its path, before their first
other import. Modules that not every caller needs are imported in the functions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when process ``parent``, which started it, ends.

    The end of the thread that started this process counts as the end of the parent.
    """
    if sys.platform != "linux":
        end_after(parent)
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The parent may have ended before the call.
    if os.getppid() != parent:
        _end()


def end_after(process: int) -> None:
    """Start a thread that kills this process when another process of this user ends."""

    def watch() -> None:
        _wait_for_end(process)
        _end()

    threading.Thread(target=watch, daemon=True).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(process: int) -> None:
    import select

    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Systems other than Linux, and Linux before 5.3.
        while _exists(process):
            time.sleep(_POLL_S)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
