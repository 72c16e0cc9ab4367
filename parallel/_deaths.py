"""What to say of workers that have ended."""

from __future__ import annotations

import signal

from ._remote_errors import rebuild
from .errors import BrokenPoolError, TaskTimeoutError, WorkerDiedError

# Ends of a fork server's children are not known once it has been killed: this is what they get.
_UNKNOWN_TO_FORK_SERVER = 255
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def how_it_ended(exitcode: int | None) -> str:
    """Return in words how a process ended."""
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"left with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode in _CRASHES:
        return f"was killed by {name} (a crash in compiled code)"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def ends_by_itself(exitcode: int | None, start_method: str) -> bool:
    """Return whether a process has left, or crashed, by its own doing: a next one would as well."""
    if exitcode is None or (start_method, exitcode) == ("forkserver", _UNKNOWN_TO_FORK_SERVER):
        return False
    return exitcode >= 0 or -exitcode in _CRASHES


def death_error(
    task: str, worker: int, pid: int, exitcode: int | None, timeout: float | None
) -> WorkerDiedError:
    """Return the error of a task that ended with its worker; `timeout`: it was killed for that."""
    known = {"task": task, "worker": worker, "pid": pid, "exitcode": exitcode}
    where = f"worker {worker} (pid {pid})"
    if timeout is not None:
        text = f"{task} ran longer than task_timeout={timeout:g} s; {where} was killed and replaced"
        return TaskTimeoutError(text, **known)  # type: ignore[arg-type]
    how = how_it_ended(exitcode)
    if exitcode is not None and exitcode >= 0:
        how += " (os._exit or sys.exit in the task)"
    verb = "are" if task.startswith("tasks") else "is"
    return WorkerDiedError(f"{task} {verb} lost: {where} {how}", **known)  # type: ignore[arg-type]


def initializer_error(worker: int, description: bytes) -> BrokenPoolError:
    """Return the error of a pool whose initializer raises."""
    reason = rebuild(description)
    told = str(reason.__cause__ or reason).strip().strip('"').strip()
    error = BrokenPoolError(
        f"the pool is broken: the initializer failed in worker {worker}:\n{told}"
    )
    error.__cause__ = reason
    return error


def start_error(starts: int, how: str, seconds: float) -> BrokenPoolError:
    """Return the error of a pool whose workers do not live to take a task."""
    return BrokenPoolError(
        f"the pool is broken: within {seconds:.1f} s no worker became ready, and {starts} ended; "
        f"the last {how}. Does the initializer end the process? Does the script start pools "
        'outside of `if __name__ == "__main__":`?'
    )
