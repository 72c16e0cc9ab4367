"""The `stepwrap` command: from words to a command, from its end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from ...registry import ConfigError
from ..failure import Failure, LaunchError, Terminated, TrainingFailed
from ..guard import handling
from .options import COMMANDS, UsageError, parse, read_run

OK, FAILED, MISTAKE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 an error in the run, 2 a mistake in the command line or the config, 3 that
    `convert` found something without a counterpart, 130 an end by Ctrl-C, 143 one by SIGTERM or
    by the end of the terminal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with _signals_end_at_once():
            options = parse(words)
            options.config = read_run(options)
            home = import_module(f".{COMMANDS[options.command].home}", __package__)
            return int(getattr(home, f"run_{options.command}")(options))
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, Terminated) as error:
        stop = error if isinstance(error, Terminated) else Terminated(signal.SIGINT)
        print(_stop_text(stop), file=sys.stderr)
        return 128 + stop.number
    except TrainingFailed as error:
        code = _tell_error(error.__cause__ or error, debug)
        again = f"continue with: stepwrap train {error.config} --resume"
        if error.saved is not None:
            print(f"  the last checkpoint is {error.saved}; {again}", file=sys.stderr)
        if error.aside is not None:
            told = f"{error.aside} has the last update, without its random streams"
            print(f"  {told}; {again} {error.aside}", file=sys.stderr)
        return code
    except Exception as error:
        return _tell_error(error, debug)


def _tell_error(error: BaseException, debug: bool) -> int:
    """Print what went wrong; returns the exit code."""
    rank = os.environ.get("RANK")
    failures = [Failure.of(error, int(rank) if rank else None)]
    is_mistake = isinstance(error, (UsageError, ConfigError))
    if isinstance(error, LaunchError):
        failures, is_mistake = error.failures, error.failures[0].kind == "ConfigError"
    elif is_mistake and rank not in (None, "", "0"):
        # The same on every rank of torchrun's: one of them tells it.
        return MISTAKE
    if is_mistake:
        # Most ranks say the same.
        mistakes = [one for one in failures if one.kind == failures[0].kind]
        traces, lines = [mistakes[0].trace], list(dict.fromkeys(one.message for one in mistakes))
    else:
        ranks = ["" if one.rank is None else f"rank {one.rank}: " for one in failures]
        pairs = zip(reversed(ranks), reversed(failures), strict=True)
        traces = [f"{rank}{one.trace}\n" for rank, one in pairs]
        lines = list(failures[0].lines())
        if not debug:
            lines.append("  --debug shows the whole traceback")
    print("".join(traces if debug else []) + "\n".join(lines), file=sys.stderr)
    return MISTAKE if is_mistake else FAILED


@contextmanager
def _signals_end_at_once() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end this process; the end of the terminal, SIGHUP, counts as SIGTERM.

    Raised within an import, as `raising_stops` does it for the work, they might come out as another
    error.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{_stop_text(Terminated(number))}\n".encode())
        os._exit(128 + number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Whoever handles SIGTERM by then: a training that runs saves and stops.
        signal.raise_signal(signal.SIGTERM)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGTERM: end}
    # Not in the background, and not under nohup.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        handlers[signal.SIGINT] = end
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        handlers[signal.SIGHUP] = pass_on
    with handling(handlers):
        yield


def _stop_text(stop: Terminated) -> str:
    name = "Ctrl-C" if stop.number == signal.SIGINT else str(stop)
    saved = f"the last checkpoint is {stop.saved}" if stop.saved else "nothing was saved"
    return f"stopped by {name}; {saved}"
