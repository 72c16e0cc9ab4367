"""Run Python programs like `programs.py`, but in processes that have imported torch already.

Each program is a real process with its own output, exit code and state. It is forked from a
template process that starts at the first call, which saves the imports, seconds for each program.
Use `programs.py` for tests of imports, interpreter options, and the environment of the start.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import forks


class _Program(NamedTuple):
    words: list[str]
    cwd: str
    environment: dict[str, str]


def ended(
    *words: Any,
    timeout: float = 400.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, where the words begin with `-c`, `-m` or a file.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    environment = dict(os.environ if env is None else env)
    program = _Program([str(word) for word in words], str(cwd or Path.cwd()), environment)
    at_start = forks.read_at_start
    if at_start(environment) != at_start(os.environ):
        raise ValueError(f"{at_start(environment)} must be set at the start: use programs.ended")
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(input.encode())
        given.seek(0)
        code = _template().run(program, [given, out, err], timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if code is None:
        raise subprocess.TimeoutExpired(program.words, timeout, *texts)
    return subprocess.CompletedProcess(program.words, code, *texts)


def run(*words: Any, **options: Any) -> str:
    """Return the output of `python WORDS`, which must succeed; `options` as for `ended`."""
    done = ended(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(code: str, folder: Path) -> str:
    """Run a program as a file in a folder and return its output."""
    (folder / "script.py").write_text(code)
    return run("script.py", cwd=folder)


class _Template:
    """The process that forks the programs."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.forks, theirs_of_forks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = "import sys; sys.path.insert(0, sys.argv[1]); import warm; warm.serve()"
        with theirs, theirs_of_forks:
            descriptors = [theirs.fileno(), theirs_of_forks.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(Path(__file__).parent), *map(str, descriptors)],
                pass_fds=descriptors,
                # Read when torch is imported; a launch sets it for its ranks.
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
                stdin=subprocess.DEVNULL,
                # In a separate session, so that only pytest gets Ctrl-C.
                start_new_session=True,
            )

    def run(self, program: _Program, files: list[IO[bytes]], timeout: float) -> int | None:
        """Run a program and return its exit code, or None if it had to be killed."""
        message = pickle.dumps(program)
        socket.send_fds(self._socket, [message], [file.fileno() for file in files])
        pid = self._receive()
        in_time = wait([self._socket], timeout)
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        code = self._receive()
        return code if in_time else None

    def close(self) -> None:
        # Processes that pytest has forked meanwhile, such as workers of loaders, have copies of the
        # socket, so closing this one is not enough.
        for connection in (self._socket, self.forks):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._process.wait()

    def _receive(self) -> int:
        answer = self._socket.recv(1024)
        if not answer:
            raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
        return int(pickle.loads(answer))


_started: list[_Template] = []


def _template() -> _Template:
    if not _started:
        _started.append(_Template())
        atexit.register(shutdown)
    return _started[0]


def fork_ranks() -> None:
    """Make launches of this process fork their ranks."""
    forks.fork_ranks(_forker)


def popen(*words: Any, **options: Any) -> subprocess.Popen[str]:
    """Start `python WORDS` in the background, with the options of `subprocess.Popen`."""
    return forks.popen(_forker, [str(word) for word in words], **options)


_forker = forks.Forker(lambda: _template().forks)


def shutdown() -> None:
    """End the template; the next program starts another one."""
    while _started:
        _started.pop().close()


# In the template and its children.


def serve() -> None:
    """Import the modules of most programs, then fork a program at each request.

    Nothing here may start a thread.
    """
    control, forked = (socket.socket(fileno=int(word)) for word in sys.argv[2:])
    control.set_inheritable(False)
    forked.set_inheritable(False)
    # The folders of this file and of the start: each program has its own.
    del sys.path[:2]
    # Whatever most programs and ranks import; torch._dynamo comes with DistributedDataParallel.
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    import torchmetrics  # noqa: F401

    import stepwrap.collectives
    import stepwrap.loops
    import stepwrap.runner.command.cli
    import stepwrap.runner.command.run_commands
    import stepwrap.wrappers  # noqa: F401

    gc.collect()
    gc.freeze()
    if os.fork() == 0:
        control.close()
        forks.serve(forked)
    forked.close()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(pickle.loads(message), fds)
        for fd in fds:
            os.close(fd)
        control.send(pickle.dumps(pid))
        control.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _become(program: _Program, fds: list[int]) -> NoReturn:
    """Run a program as the interpreter does, and exit with its code."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    # Forked before the program changes the state of this process.
    control = forks.fork_template()
    forks.fork_ranks(forks.Forker(lambda: control))
    forks.become_program(program.words, program.cwd, program.environment)
