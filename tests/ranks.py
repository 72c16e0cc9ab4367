"""Warm rank processes for tests: a two-rank test is one function call.

The processes start at the first call and serve the whole pytest run; they are forked from a
template process that has imported torch. Each call gets a new gloo group over a file store in a
fresh folder, destroyed when every rank has reported:

    def _sum_of_ranks() -> float:
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value)
        return value.item()

    def test_sum() -> None:
        assert run_ranks(_sum_of_ranks, 2) == [1.0, 1.0]

A test that compares nothing between the ranks can itself run on them, by `@on_ranks(2)`.

Functions, arguments and results travel by plain pickle, so functions live at module level. Inside,
every call starts from the same state: the caller's directory, import path, warning filters and
environment (without the variables that launchers set), seed 0, default dtype float32, one thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import rank_process
from rank_process import RankCall, RankStart, remove_launcher

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

START_TIMEOUT_S = 120.0
# How long the other ranks may run after one has failed.
GRACE_S = 5.0
# How long a teardown may take; it collects garbage, and the machine may be busy.
TEARDOWN_S = 90.0


class RanksError(RuntimeError):
    """Ranks failed, died or stayed silent; the text has each one's traceback or stack.

    Attributes:
        reports: the failure of each rank, in the order in which the ranks failed, so that a rank
            that failed only because of another one comes after it.
    """

    def __init__(self, world_size: int, reports: dict[int, str]) -> None:
        self.reports = reports
        ranks = ", ".join(map(str, reports))
        sections = [f"{len(reports)} of {world_size} ranks failed, the first one first: {ranks}"]
        sections += [f"--- rank {rank}: {text.rstrip()}" for rank, text in reports.items()]
        super().__init__("\n".join(sections))


def run_ranks(
    fn: Callable[..., T],
    world_size: int = 2,
    *args: Any,
    timeout_s: float = 300.0,
    group_timeout_s: float | None = None,
    init: bool = True,
    **kwargs: Any,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank and return the results by rank.

    Args:
        fn: a module-level function.
        timeout_s: a rank that has not returned by then is named and the processes are restarted.
        group_timeout_s: timeout of the group's collectives (default: `timeout_s`).
        init: False runs the function without a process group.

    Raises:
        RanksError: a rank raised, died or stayed silent.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    call = RankCall(
        payload=pickle.dumps((fn, args, kwargs)),
        world_size=world_size,
        group_timeout_s=group_timeout_s or timeout_s,
    )
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        call.store = str(Path(folder, "store")) if init else None
        try:
            results, reports, broken = _processes.call(call, timeout_s)
        except BaseException:
            _processes.kill()
            raise
    if broken:
        _processes.kill()
    if reports:
        raise RanksError(world_size, reports)
    return [results[rank] for rank in range(world_size)]


def on_ranks(world_size: int, *, init: bool = True) -> Callable[[Test], Test]:
    """Run the body of a test, with its arguments, on every rank of `run_ranks`."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            if rank_process.is_rank:
                test(*args, **kwargs)
            else:
                run_ranks(run, world_size, *args, init=init, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def shutdown() -> None:
    """End the rank processes and their template; the next `run_ranks` starts new ones."""
    _processes.shutdown()


class _Template:
    """The process that forks the ranks: importing torch takes each new process over a second."""

    def __init__(self) -> None:
        self._exit_codes: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = (
            "import sys; sys.path.insert(0, sys.argv[1]); "
            "from rank_process import fork_ranks; fork_ranks()"
        )
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", start, str(Path(__file__).parent)]
                + [str(theirs.fileno())],
                env=_rank_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                # In a separate session, so that only pytest gets Ctrl-C.
                start_new_session=True,
            )

    def fork(self, rank: int, connection: int, stack: Path, output: Path) -> int:
        start = RankStart(rank, str(stack), str(output), _rank_environment())
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [pickle.dumps(start)], [connection])
        while True:
            kind, pid, code = self._receive()
            if kind == "started":
                return pid
            self._exit_codes[pid] = code

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a rank, or None if it is alive."""
        while pid not in self._exit_codes and wait([self._socket], timeout=0):
            self._take_exit()
        return self._exit_codes.get(pid)

    def wait(self, pid: int, timeout_s: float | None = None) -> int:
        """Wait for the end of a rank and return its exit code.

        Raises:
            TimeoutError: it has not ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._exit_codes:
            remaining_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not wait([self._socket], timeout=remaining_s):
                raise TimeoutError(f"process {pid} has not ended within {timeout_s} s")
            self._take_exit()
        return self._exit_codes[pid]

    def close(self) -> None:
        """End the process by closing the connection."""
        self._socket.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _take_exit(self) -> None:
        """Wait until a rank ends and record its exit code."""
        _, pid, code = self._receive()
        self._exit_codes[pid] = code

    def _receive(self) -> tuple[str, int, int]:
        try:
            message = self._socket.recv(1024)
        except OSError:
            message = b""
        if not message:
            code = self._process.wait()
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")
            raise RuntimeError(f"the process that forks ranks ended with {code}:\n{output}")
        return pickle.loads(message)  # type: ignore[no-any-return]


def _rank_environment() -> dict[str, str]:
    environment: dict[str, str] = remove_launcher(os.environ.items())
    return environment | {"OMP_NUM_THREADS": "1"}


class _Rank:
    """The parent's handle of a rank process."""

    def __init__(self, rank: int, folder: Path, template: _Template) -> None:
        self.rank = rank
        self.stack = folder / f"stack_{rank}.txt"
        self.output = folder / f"output_{rank}.txt"
        self.output.touch()
        self._shown = 0
        self._template = template
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid = template.fork(rank, theirs.fileno(), self.stack, self.output)
        self.connection = Connection(ours.detach())

    def is_alive(self) -> bool:
        return self._template.poll(self.pid) is None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        return self._template.wait(self.pid, timeout_s)

    def send(self, message: bytes) -> None:
        """Send a message; if the process has ended, waiting for its answer reports it."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def dump_stack(self) -> str:
        """Ask the process for the Python stacks of all its threads."""
        self.stack.write_text("")
        os.kill(self.pid, signal.SIGUSR1)
        size, deadline = 0, time.monotonic() + 60.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if size and self.stack.stat().st_size == size:
                break
            size = self.stack.stat().st_size
        return self.stack.read_text() or "(no stack could be had)"

    def new_output(self) -> str:
        """Return what the process has printed since the last call."""
        if self.output.stat().st_size == self._shown:
            return ""
        with self.output.open("rb") as output:
            output.seek(self._shown)
            text = output.read()
        self._shown += len(text)
        return text.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process with everything it started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.connection.close()


class _Processes:
    """The rank processes of this pytest run."""

    def __init__(self) -> None:
        self.members: list[_Rank] = []
        self.folder: Path | None = None
        self.template: _Template | None = None

    def call(self, call: RankCall, timeout_s: float) -> tuple[dict[int, Any], dict[int, str], bool]:
        """Return results and failure reports by rank, and whether the processes must be killed."""
        self._grow(call.world_size)
        members = self.members[: call.world_size]
        message = pickle.dumps(call)
        for member in members:
            member.send(message)
        work = _Wait(members, timeout_s)
        work.run()
        for rank in work.results:
            members[rank].send(b"release")
        # Wait for the teardown too, so that one that hangs is not blamed on the next call.
        lost = {*work.lost}
        teardown = _Wait([m for m in members if m.rank not in lost], TEARDOWN_S)
        teardown.run()
        for member in members:
            for line in member.new_output().splitlines():
                print(f"[rank {member.rank}] {line}")
        reports = work.reports() | {
            rank: f"in the teardown: {text}"
            for rank, text in teardown.reports().items()
            if rank not in work.failures
        }
        return work.results, reports, bool(lost or teardown.lost)

    def _grow(self, size: int) -> None:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self.template = self.template or _Template()
        started = []
        for rank in range(len(self.members), size):
            started.append(_Rank(rank, self.folder, self.template))
            self.members.append(started[-1])
        start = _Wait(started, START_TIMEOUT_S)
        start.run()
        if start.failures:
            raise RanksError(size, start.reports())

    def shutdown(self) -> None:
        """Let the processes exit by themselves, kill those that do not, and end the template."""
        for member in self.members:
            member.send(b"exit")
        for member in self.members:
            with contextlib.suppress(TimeoutError):
                member.wait(GRACE_S)
        self.kill()
        if self.template is not None:
            self.template.close()
            self.template = None

    def kill(self) -> None:
        """Leave no rank and no file."""
        for member in self.members:
            member.kill()
        self.members = []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


class _Wait:
    """Waits for one answer of each member: a result, an error, its end or its silence."""

    def __init__(self, members: list[_Rank], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waiting = {member.rank: member for member in members}
        self.results: dict[int, Any] = {}
        self.failures: dict[int, tuple[float, str]] = {}
        self.lost: list[int] = []

    def run(self) -> None:
        """Fill `results`, `failures` (rank -> time, text) and `lost` (dead or silent ranks)."""
        started = time.monotonic()
        deadline = started + self.timeout_s
        while self.waiting and time.monotonic() < deadline:
            ready = wait([m.connection for m in self.waiting.values()], timeout=0.1)
            for member in list(self.waiting.values()):
                if member.connection in ready or not member.is_alive():
                    del self.waiting[member.rank]
                    self._take_answer(member)
            if self.failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        silent_s = time.monotonic() - started
        for rank, member in self.waiting.items():
            text = f"silent for {silent_s:.1f} s; its stack:\n{member.dump_stack()}"
            self.failures[rank] = (time.monotonic(), text)
            self.lost.append(rank)

    def _take_answer(self, member: _Rank) -> None:
        try:
            # Do not block: a process forked by a dead rank may keep the connection open.
            message = member.connection.recv_bytes() if member.connection.poll() else b""
        except (EOFError, OSError):
            message = b""
        if not message:
            code = member.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            output = member.new_output()[-4000:]
            text = f"the process ended {how}; its output:\n{output or '(none)'}"
            # The time is unknown, but an ended rank is a cause, so it precedes every error.
            self.failures[member.rank] = (0.0, text)
            self.lost.append(member.rank)
            return
        kind, value, when = pickle.loads(message)
        if kind == "error":
            self.failures[member.rank] = (when, value)
            # Its group ends now, so that peers waiting for it fail at once.
            member.send(b"release")
        else:
            self.results[member.rank] = value

    def reports(self) -> dict[int, str]:
        """Return the texts of the failures by rank, the earliest failure first."""
        in_order = sorted(self.failures, key=lambda rank: self.failures[rank][0])
        return {rank: self.failures[rank][1] for rank in in_order}


_processes = _Processes()
atexit.register(shutdown)
