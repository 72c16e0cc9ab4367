"""Run Python programs like `programs.py`, but in processes that have imported torch already.

Each program is a real process with its own output, exit code and state. It is forked from a
template process that starts at the first call, which saves the imports, seconds for each program.
Use `programs.py` for tests of imports, interpreter options, and the environment of the start.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import multiprocessing.process
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

# Variables that only the start of an interpreter reads; the template was started with these.
_AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONHASHSEED")


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
    changed = [name for name in _AT_START if environment.get(name) != os.environ.get(name)]
    if changed:
        raise ValueError(f"{changed} must be set at the start: use programs.ended")
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
        start = "import sys; sys.path.insert(0, sys.argv[1]); import warm; warm.serve()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(Path(__file__).parent), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
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
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
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


def shutdown() -> None:
    """End the template; the next program starts another one."""
    while _started:
        _started.pop().close()


# In the template and its children.


def serve() -> None:
    """Import the modules of most programs, then fork a program at each request.

    Nothing here may start a thread.
    """
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    # The folders of this file and of the start: each program has its own.
    del sys.path[:2]
    import torch.distributed.fsdp  # noqa: F401

    import stepwrap.collectives
    import stepwrap.loops
    import stepwrap.runner.command.cli
    import stepwrap.runner.command.run_commands
    import stepwrap.wrappers  # noqa: F401

    gc.collect()
    gc.freeze()
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
    os.chdir(program.cwd)
    # multiprocessing looks for the main program here.
    multiprocessing.process.ORIGINAL_DIR = program.cwd
    os.environ.clear()
    os.environ.update(program.environment)
    added = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path]
    code = _interpret_to_the_end(program.words)
    # As at the end of an interpreter, which would also free all modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _interpret_to_the_end(words: list[str]) -> int:
    """Run a program and return its exit code."""
    try:
        _interpret(*words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Without the frames of this file.
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _interpret(first: str, *words: str) -> None:
    if first == "-m":
        module, *arguments = words
        sys.argv[:] = [module, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    # The template's own main module, without its content: other modules may refer to it.
    main = sys.modules["__main__"]
    vars(main).clear()
    vars(main).update(vars(types.ModuleType("__main__")), __builtins__=builtins)
    if first == "-c":
        text, *arguments = words
        sys.argv[:] = ["-c", *arguments]
        sys.path.insert(0, "")
        code = compile(text, "<string>", "exec")
    else:
        sys.argv[:] = [first, *words]
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)
