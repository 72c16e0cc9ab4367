"""Functions that use queues in other processes; without torch."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from stepwrap.parallel import SimpleQueue


def started(context: BaseContext, function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a daemon process that runs the function."""
    process: BaseProcess = context.Process(target=function, args=arguments, daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process


def served(
    context: BaseContext, function: Callable[..., object], *arguments: Any
) -> tuple[Any, Any, BaseProcess]:
    """Return two queues and a process that runs a function with them and further arguments."""
    inbox: Any = SimpleQueue()
    back: Any = SimpleQueue()
    return inbox, back, started(context, function, inbox, back, *arguments)


def ended(process: BaseProcess) -> int | None:
    """Wait for a process to end and return its exit code."""
    process.join(30)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def is_asleep(pid: int | None) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def echo(inbox: Any, back: Any) -> None:
    """Send values back until None comes."""
    while (value := inbox.get()) is not None:
        back.put(value)


def get_modules(inbox: Any, back: Any) -> None:
    """Send values back, and whether torch was imported for them."""
    back.put((inbox.get(), "torch" in sys.modules, "cloudpickle" in sys.modules))


def put_all(queue: Any, values: list[Any]) -> None:
    for value in values:
        queue.put(value)


def put_for_ever(queue: Any, value: Any) -> None:
    while True:
        queue.put(value)


def get_for_ever(queue: Any) -> None:
    while True:
        queue.get()


def count_until_none(queue: Any, back: Any) -> None:
    """Send the values that came before None."""
    values = []
    while (value := queue.get()) is not None:
        values.append(value)
    back.put(values)


def put_and_die(queue: Any, value: Any) -> None:
    queue.put(value)
    os.kill(os.getpid(), signal.SIGKILL)


def get_one_and_wait(queue: Any, back: Any) -> None:
    """Get a value, send it back, and wait for the next one."""
    back.put(queue.get())
    queue.get()


def get_with_few_descriptors(queue: Any, back: Any, spare: int) -> None:
    """Get a value with only `spare` free descriptors; send the error's type and text."""
    from stepwrap.parallel import dumps

    # Import modules that sending the answer needs.
    dumps(("", ""))

    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
    descriptors = []
    try:
        while True:
            descriptors.append(os.dup(0))
    except OSError:
        for number in descriptors[:spare]:
            os.close(number)
    try:
        back.put(("got", type(queue.get()).__name__))
    except Exception as error:
        back.put((type(error).__name__, str(error)))
