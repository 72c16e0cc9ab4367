"""Fork programs, and the ranks that they launch, from a process that has imported torch already.

A launch spawns its ranks: each one is a new interpreter, whose imports take seconds of processor
time. In tests, `multiprocessing` asks a template for such a process instead, and `Popen` does the
same for programs. The template is a child of the process that asks, or a child of its child. It has
imported the modules but run nothing else, so the state of a forked process is that of a new
interpreter after its imports. Programs of `programs.py` and their ranks start like those of users.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import inspect
import multiprocessing.process
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# A launch starts its ranks with a call of this function.
_MARK = "end_with_parent"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# The name of a template among the processes.
TEMPLATE = "template"
# Received descriptors are first moved above this number, out of the way of those they replace.
_HIGH = 500
# The arguments of `subprocess.Popen` with both ends of each pipe.
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class _Request(NamedTuple):
    words: list[str]
    cwd: str
    environment: dict[str, str]
    # The signals that the new process blocks, as it would inherit them.
    blocked: list[int]
    # The numbers of the sent file descriptors in the new process.
    descriptors: list[int]
    starts_session: bool = False


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only the start of an interpreter and its libraries read."""
    names = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PRETEND_CUDA")
    return {
        name: value
        for name, value in environment.items()
        if name in names or (name.startswith("PYTHON") and name != "PYTHONPATH")
    }


class Forker:
    """Asks a template for processes, which become children of this process.

    Args:
        connect: returns the connection to the template; called at the first request.
    """

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect, self._lock = connect, threading.Lock()

    def fork(self, words: Sequence[str], descriptors: Mapping[int, int], **options: Any) -> int:
        """Return the process id of a process that runs `python WORDS`.

        Args:
            descriptors: open descriptors by their numbers in the new process.
            options: further values of the request.
        """
        request: dict[str, Any] = {
            "words": list(words),
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "descriptors": list(descriptors),
            **options,
        }
        with self._lock:
            control = self._connect()
            _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                message = pickle.dumps(_Request(**request))
                socket.send_fds(control, [message], list(descriptors.values()))
                answer = control.recv(1024)
            finally:
                _call_prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the process that forks has ended")
        return int(answer)


def fork_ranks(forker: Forker) -> None:
    """Make launches of this process fork their ranks."""
    spawn = util.spawnv_passfds  # type: ignore[attr-defined]
    at_start = read_at_start(os.environ)

    def fork_or_spawn(path: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in command]
        # Before `-c` come the interpreter and its options, which the template has, too.
        program = words[words.index("-c") :]
        if _MARK not in program[1] or read_at_start(os.environ) != at_start:
            return int(spawn(path, command, descriptors))
        return forker.fork(program, {number: number for number in {0, 1, 2, *descriptors}})

    util.spawnv_passfds = fork_or_spawn  # type: ignore[attr-defined]


def popen(forker: Forker, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start `python WORDS` with the options of `subprocess.Popen`."""

    class Popen(subprocess.Popen[str]):
        def _execute_child(self, *arguments: Any) -> None:
            signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
            call = signature.bind(self, *arguments).arguments
            pipes = {0: call["p2cread"], 1: call["c2pwrite"], 2: call["errwrite"]}
            environment = dict(os.environ if call["env"] is None else call["env"])
            if read_at_start(environment) != read_at_start(os.environ):
                raise ValueError(f"{read_at_start(environment)} must be set at the start")
            self.pid = forker.fork(
                call["args"],
                {number: number if pipe == -1 else pipe for number, pipe in pipes.items()},
                cwd=os.path.abspath(call["cwd"] or os.getcwd()),
                environment=environment,
                starts_session=call["start_new_session"],
            )
            self._child_created = True
            self._close_pipe_fds(*(call[name] for name in _PIPES))  # type: ignore[attr-defined]

    return Popen(list(words), **options)


def _call_prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _set_name(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def fork_template() -> socket.socket:
    """Fork a process that forks others, and return the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    return ours


def serve(control: socket.socket) -> NoReturn:
    """Fork a rank at each request until the other side closes the connection.

    Nothing here may start a thread.
    """
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_name(TEMPLATE)
    # Only the forked processes get Ctrl-C, and only they keep their output open.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "r+") as devnull:
        for number in range(3):
            os.dup2(devnull.fileno(), number)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 64)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        # The rank is an orphan once the process between it and this one has ended.
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(reader)
                os.close(writer)
                _become(pickle.loads(message), descriptors, between)
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        control.send(os.read(reader, 100))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _become(request: _Request, descriptors: list[int], between: int) -> NoReturn:
    while os.getppid() == between:
        time.sleep(0.001)
    if request.starts_session:
        os.setsid()
    rank = request.environment.get("RANK")
    _set_name("program" if rank is None else f"rank_{rank}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _seed_afresh()
    # Forked before the program changes the state of this process. A rank may launch ranks, too.
    control = fork_template()
    fork_ranks(Forker(lambda: control))
    become_program(request.words, request.cwd, request.environment)


def _seed_afresh() -> None:
    """Seed the generators as new interpreters do; a fork has the state of its template."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()


# Also for the programs of warm.py.


def become_program(words: list[str], cwd: str, environment: Mapping[str, str]) -> NoReturn:
    """Run a program as the interpreter does, and exit with its code."""
    os.chdir(cwd)
    # multiprocessing looks for the main program here.
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path]
    code = _interpret_to_the_end(words)
    # As at the end of an interpreter, which would also free all modules.
    threading._shutdown()  # type: ignore[attr-defined]
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


def _interpret(option_or_file: str, *words: str) -> None:
    if option_or_file == "-m":
        module, *arguments = words
        sys.argv[:] = [module, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    # The template's own main module, without its content: other modules may refer to it.
    main: Any = sys.modules["__main__"]
    vars(main).clear()
    vars(main).update(vars(types.ModuleType("__main__")), __builtins__=builtins)
    if option_or_file == "-c":
        text, *arguments = words
        sys.argv[:] = ["-c", *arguments]
        sys.path.insert(0, "")
        code = compile(text, "<string>", "exec")
    else:
        sys.argv[:] = [option_or_file, *words]
        sys.path.insert(0, str(Path(option_or_file).resolve().parent))
        main.__file__ = option_or_file
        code = compile(Path(option_or_file).read_bytes(), option_or_file, "exec")
    exec(code, main.__dict__)
