"""Functions for processes of the tests; without torch, so that spawned ones start fast."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path


class TwoArguments(Exception):
    """An error whose `args` differ from the arguments of its constructor."""

    def __init__(self, key: str, value: int) -> None:
        super().__init__(f"{key} must not be {value}")
        self.key, self.value = key, value


def send(connection: Connection, value: object) -> None:
    connection.send(value)


def send_modules(connection: Connection) -> None:
    assert multiprocessing.current_process().exception is None  # type: ignore[attr-defined]
    connection.send("torch" in sys.modules)


def fail(text: str = "wrong") -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise TwoArguments(text, 3) from error


def leave(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def leave_at_once(code: int) -> None:
    os._exit(code)


def kill(number: int) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), number)
    signal.pause()


def sleep() -> None:
    time.sleep(60)


def create(path: Path) -> None:
    with path.open("x") as file:
        file.write(str(os.getpid()))


def fail_to_clean() -> None:
    raise ValueError("not clean")


def fork(fails: bool) -> None:
    """Fork a child that returns from the target, with an exception or without."""
    pid = os.fork()
    if pid != 0:
        os.waitpid(pid, 0)
    elif fails:
        raise RuntimeError("in the child's child")


def fail_and_stay(until: Path) -> None:
    def wait() -> None:
        while not until.exists():
            time.sleep(0.01)

    threading.Thread(target=wait).start()
    raise ValueError("failed, yet here")
