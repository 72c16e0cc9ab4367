"""The ``stepwrap`` command: find a command, run it and turn its outcome into an exit code."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from ...primitives.stop_signals import (
    COUNT_AS_SIGTERM,
    handling,
    pass_on_as_sigterm,
    signal_name,
)
from ...primitives.suggestions import did_you_mean
from ...registry import ConfigError, Problem
from ..failure import LaunchError, RankFailure, Terminated, TrainingFailed
from .command import DEBUG, HELP_OPTIONS, mistake

FAILED, MISTAKE = 1, 2
# Each entry point in this group names a `click.Command`.
GROUP = "stepwrap.commands"
# The shell sets this variable when it completes a command line.
_COMPLETE = "_STEPWRAP_COMPLETE"


class CommandGroup(click.Group):
    """The commands of this package and of other packages.

    A command is imported only when it is called or listed in a help text.
    """

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Map names to entry points; our commands take precedence over others of the same name."""
        points = entry_points(group=GROUP)
        ours_last = sorted(points, key=lambda entry: entry.value.startswith("stepwrap."))
        return {entry.name: entry for entry in ours_last}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.entries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.entries:
            return None
        try:
            command = self.entries[name].load()
            if not isinstance(command, click.Command):
                raise TypeError(f"{command!r} is not a click.Command")
        except (Exception, SystemExit) as error:
            return _unavailable(self.entries[name], error)
        if not any(param.name == DEBUG.name for param in command.params):
            command.params.append(
                click.Option(DEBUG.opts, is_flag=True, expose_value=False, help=DEBUG.help)
            )
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            # The shell is completing a command line, which need not be valid yet.
            return super().parse_args(ctx, args)
        name, *arguments = args or ["--help"]
        names = self.list_commands(ctx)
        if not names:
            raise mistake("stepwrap: the entry points are missing; install the package again")
        if name in ctx.help_option_names:
            return super().parse_args(ctx, [name])
        name = "version" if name == "--version" else name
        if name not in names:
            hint = did_you_mean(name, names, limit=1) or f"; use one of {', '.join(names)}"
            raise mistake(f"stepwrap: unknown command {name}{hint}")
        return super().parse_args(ctx, [name, *arguments])


def _unavailable(entry: EntryPoint, error: BaseException) -> click.Command:
    """Return a placeholder for a command that cannot be imported; calling it raises the error."""
    message = f"cannot be imported from {entry.module}: {type(error).__name__}: {error}"
    line = " ".join(message.split())

    def fail() -> NoReturn:
        problem = Problem("", f"stepwrap {entry.name}: {line}", cause=error)
        raise ConfigError([problem]) from error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry.name, callback=fail, short_help=line, context_settings=settings)


COMMANDS = CommandGroup(
    help="Train any PyTorch model under any parallelism, from a config.",
    epilog="Run stepwrap COMMAND --help for the options of a command.",
    options_metavar="",
    subcommand_metavar="COMMAND ...",
    context_settings=HELP_OPTIONS,
)


def _output_is_closed() -> bool:
    """Return whether the reader of our output (head, less) has ended; write no more to it then."""
    poller = select.poll()
    with suppress(OSError, ValueError):
        poller.register(sys.stdout.fileno(), 0)
    if not poller.poll(0):
        return False
    # Keep Python from reporting it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 means success. 1 means an error during the run, a search without a result, or a difference or
    damage that ``verify-resume`` or ``checkpoint`` found. 2 means a mistake in the command line or
    the config. 3 means that ``convert`` could not convert a setting or that ``bisect`` found a
    difference. 130 means that Ctrl-C stopped the command; 143 means SIGTERM, SIGUSR1 or a closed
    terminal.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name, debug = "".join(args[:1]), "--debug" in args
    try:
        with _signals_end_at_once():
            if instruction := os.environ.get(_COMPLETE):
                return shell_complete(COMMANDS, {}, "stepwrap", _COMPLETE, instruction)
            with COMMANDS.make_context("stepwrap", [*args]) as context:
                return int(COMMANDS.invoke(context) or 0)
    except click.exceptions.Exit as end:
        # --help raises this.
        return end.exit_code
    except click.ClickException as error:
        failed = error.ctx if isinstance(error, click.UsageError) else None
        where = failed.command_path if failed else f"stepwrap {name}"
        wrong = mistake(f"{where}: {error.format_message()}")
        wrong.__cause__ = error
        _print_error(wrong, debug)
        return error.exit_code
    except BrokenPipeError as error:
        return FAILED if _output_is_closed() else _print_error(error, debug)
    except (KeyboardInterrupt, Terminated) as error:
        stop = error if isinstance(error, Terminated) else Terminated(signal.SIGINT)
        print(_stop_text(stop), file=sys.stderr)
        return 128 + stop.number
    except TrainingFailed as error:
        code = _print_error(error if error.__cause__ is None else error.__cause__, debug)
        again = f"continue with: stepwrap train {error.config} --resume"
        if error.saved is not None:
            print(f"  the last checkpoint is {error.saved}; {again}", file=sys.stderr)
        if error.aside is not None:
            partial = (
                f"{error.aside} has the state after the last update; a run resumed from it draws "
                "other random numbers"
            )
            print(f"  {partial}; {again} {error.aside}", file=sys.stderr)
        return code
    except Exception as error:
        return _print_error(error, debug)


def _print_error(error: BaseException, debug: bool) -> int:
    """Print an error to stderr and return the exit code."""
    rank = os.environ.get("RANK")
    failures = [RankFailure.of(error, int(rank) if rank else None)]
    if isinstance(error, LaunchError):
        failures = error.failures
    elif isinstance(error, ConfigError) and rank not in (None, "", "0"):
        # Under torchrun every rank raises the same error; rank 0 prints it.
        return MISTAKE
    is_mistake = failures[0].kind == "ConfigError"
    if is_mistake:
        # Most ranks report the same mistakes.
        mistakes = [failure for failure in failures if failure.kind == failures[0].kind]
        traces, lines = (
            [mistakes[0].trace],
            list(dict.fromkeys(failure.message for failure in mistakes)),
        )
    else:
        ranks = ["" if failure.rank is None else f"rank {failure.rank}: " for failure in failures]
        pairs = zip(reversed(ranks), reversed(failures), strict=True)
        traces = [f"{rank}{failure.trace}\n" for rank, failure in pairs]
        lines = list(failures[0].lines())
        if not debug:
            lines.append("  --debug shows the whole traceback")
    print("".join(traces if debug else []) + "\n".join(lines), file=sys.stderr)
    return MISTAKE if is_mistake else FAILED


@contextmanager
def _signals_end_at_once() -> Iterator[None]:
    """End the process on Ctrl-C and SIGTERM; SIGHUP and SIGUSR1 count as SIGTERM.

    An exception raised in the middle of an import might be replaced by another error, so these
    handlers do not raise. Commands use ``raising_stops`` once their imports are done.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{_stop_text(Terminated(number))}\n".encode())
        os._exit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        handlers[signal.SIGTERM] = end
    # Shell scripts start background processes with SIGINT ignored; leave it ignored there.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        handlers[signal.SIGINT] = end
    free = (n for n in COUNT_AS_SIGTERM if signal.getsignal(n) == signal.SIG_DFL)
    handlers |= dict.fromkeys(free, pass_on_as_sigterm)
    with handling(handlers):
        yield


def _stop_text(stop: Terminated) -> str:
    saved = f"the last checkpoint is {stop.saved}" if stop.saved else "nothing was saved"
    return f"stopped by {signal_name(stop.number)}; {saved}"
