"""The `stepwrap` command: from words to a command, from its end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from ..registry import ConfigError
from .failure import Failure, LaunchError, Terminated
from .options import COMMANDS, UsageError, parse

OK, FAILED, MISTAKE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 an error in the run, 2 a mistake in the command line or the config, 130 an
    end by Ctrl-C, 143 one by SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with _sigterm_ends():
            options = parse(words)
            home = import_module(f".{COMMANDS[options.command].home}", __package__)
            return int(getattr(home, f"run_{options.command}")(options))
    except (UsageError, ConfigError) as error:
        _tell(str(error), Failure.of(error).trace if debug else "")
        return MISTAKE
    except LaunchError as error:
        _tell_failures(error.failures, debug)
        return MISTAKE if error.failures[0].kind == "ConfigError" else FAILED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        _tell("stopped by Ctrl-C; nothing was saved", "")
        return 128 + signal.SIGINT
    except Terminated as error:
        _tell(f"stopped by {error}; nothing was saved", "")
        return 128 + error.number
    except Exception as error:
        rank = os.environ.get("RANK")
        _tell_failures([Failure.of(error, int(rank) if rank else None)], debug)
        return FAILED


@contextmanager
def _sigterm_ends() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(text: str, trace: str) -> None:
    if trace:
        print(trace, file=sys.stderr, end="")
    print(text, file=sys.stderr)


def _tell_failures(failures: Sequence[Failure], debug: bool) -> None:
    if debug:
        for failure in reversed(failures):
            rank = "" if failure.rank is None else f"rank {failure.rank}: "
            print(f"{rank}{failure.trace}", file=sys.stderr)
    lines = list(failures[0].lines())
    if not debug:
        lines.append("  --debug shows the whole traceback")
    print("\n".join(lines), file=sys.stderr)
