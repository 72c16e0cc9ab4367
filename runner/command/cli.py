"""The `stepwrap` command: from words to a command, from its end to an exit code."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ...registry import ConfigError, Examination, Problem, examine_names, load_config, nearest
from ..failure import Failure, LaunchError, Terminated, TrainingFailed
from ..guard import COUNT_AS_SIGTERM, handling, pass_on_as_sigterm

FAILED, MISTAKE = 1, 2
_RUN = "CONFIG [key=value ...]"


@dataclass(frozen=True)
class Command:
    """One word after `stepwrap`, which takes `least` to `most` (None: any number of) others."""

    usage: str
    help: str
    home: str  # the module that holds its function
    options: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    # Of the config of a run, what the command cannot do without; "" for any.
    section: str | None = None


_RUNNING = ("nproc", "oversubscribe", "run-dir", "device", "dry-run")
COMMANDS = {
    "train": Command(
        f"{_RUN} [options]",
        "train, validate and, where data.test is given, test",
        ".run_commands",
        (*_RUNNING, "max-restarts", "resume", "fresh", "without-step"),
        section="train",
    ),
    "validate": Command(
        f"{_RUN} [options]",
        "evaluate a checkpoint on data.val",
        ".run_commands",
        (*_RUNNING, "checkpoint"),
        section="data.val",
    ),
    "test": Command(
        f"{_RUN} [options]",
        "evaluate a checkpoint on data.test",
        ".run_commands",
        (*_RUNNING, "checkpoint"),
        section="data.test",
    ),
    "check": Command(
        _RUN,
        "report every mistake in a config and build its parts on the CPU",
        ".run_commands",
        section="",
    ),
    "replay": Command(
        "RUN_DIR --step K [key=value ...] [options]",
        "run one step of a run again, from the nearest checkpoint",
        "...diagnostics.replay",
        ("step", "rank", "debugger", "anomaly", "profile"),
        section="train",
    ),
    "show": Command(f"{_RUN} [--origin]", "print the resolved config", ".commands", ("origin",)),
    "list": Command("[REGISTRY]", "print what a config can name", ".commands", (), 0, 1),
    "convert": Command(
        "MMENGINE_CONFIG.py [options]",
        "print a config of mmengine, which is executed for that, as one of ours",
        ".commands",
        ("epoch-length", "keep-order"),
        most=1,
    ),
    "bisect": Command(
        "RUN_A RUN_B [options]",
        "name the first step, rank and part at which two runs with ledgers differ",
        "...diagnostics.bisect",
        ("no-rerun",),
        least=2,
        most=2,
    ),
    "verify-resume": Command(
        f"{_RUN} [options]",
        "train, kill and resume; name the first thing that is not as without the kill",
        "...diagnostics.verify_resume",
        ("nproc", "oversubscribe", "run-dir", "device", "kill-at", "then"),
        section="train",
    ),
    "plot": Command("RUN_DIR ...", "draw curves.png in each RUN_DIR", ".commands"),
    "env": Command("", "print versions and devices, for a bug report", ".run_commands", (), 0, 0),
    "version": Command("", "print the version; so does --version", ".commands", (), 0, 0),
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _from_zero(text: str) -> int:
    return _positive(text) if text != "0" else 0


def _steps(text: str) -> int | str:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", text):
        told = f"must be the number of a step, or a range such as 1200-1210, got {text!r}"
        raise argparse.ArgumentTypeError(told)
    return int(text) if text.isdecimal() else text


_FLAG: dict[str, Any] = {"action": "store_true"}
_PATH: dict[str, Any] = {"nargs": "?", "const": True, "metavar": "PATH"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "nproc": {
        "type": _positive,
        "metavar": "N",
        "help": "processes on this machine (launch.nproc)",
    },
    "oversubscribe": {
        # None leaves the config's value.
        "action": "store_const",
        "const": True,
        "help": "start more processes than cores and memory have room for (launch.oversubscribe)",
    },
    "max-restarts": {
        "type": _from_zero,
        "metavar": "N",
        "help": "restart all ranks from the last checkpoint when one dies (launch.max_restarts)",
    },
    "run-dir": {"metavar": "DIR", "help": "the run's folder (run_dir)"},
    "device": {"choices": ("auto", "cpu", "cuda"), "help": "where to compute"},
    "dry-run": {**_FLAG, "help": "one step of everything; nothing is kept"},
    "resume": {
        **_PATH,
        "help": "continue the run in the run folder, or from the checkpoint at PATH",
    },
    "fresh": {**_FLAG, "help": "delete the results already in the run folder"},
    "without-step": {
        "type": _steps,
        "action": "append",
        "metavar": "K",
        "help": "leave out step K, or steps K-L (train.skip_steps); may be given several times",
    },
    "step": {
        "type": _positive,
        "required": True,
        "metavar": "K",
        "help": "the step's number in the log records",
    },
    "rank": {
        "type": _from_zero,
        "metavar": "R",
        "help": "the rank to look into; default: 0, with --anomaly all",
    },
    "debugger": {**_FLAG, "help": "stop right before the training step, and where it fails"},
    "anomaly": {**_FLAG, "help": "name the forward call whose gradient is NaN"},
    "profile": {"metavar": "FILE", "help": "write a trace of the step for chrome://tracing"},
    "checkpoint": {
        **_PATH,
        "help": "a checkpoint's folder, best or latest; default: the best, else the latest",
    },
    "origin": {**_FLAG, "help": "say which line or override set each value"},
    "kill-at": {
        "type": _positive,
        "metavar": "K",
        "help": "the step after which to kill; default: in the middle of an epoch",
    },
    "then": {"type": _positive, "metavar": "M", "help": "resume on M processes"},
    "no-rerun": {**_FLAG, "help": "compare the ledgers as they are, repeat no steps"},
    "epoch-length": {
        "type": _positive,
        "metavar": "N",
        "help": "batches in an epoch, for schedules with convert_to_iter_based",
    },
    "keep-order": {**_FLAG, "help": "read the data by mmengine's own loaders, in its order"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 an error in the run, 2 a mistake in the command line or the config, 3 that
    `convert` found something without a counterpart or `bisect` a difference, 130 an end by Ctrl-C,
    143 one by SIGTERM, by SIGUSR1 or by the end of the terminal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        with _signals_end_at_once():
            options = parse(words)
            options.examined = read_run(options)
            home = import_module(COMMANDS[options.command].home, __package__)
            return int(getattr(home, f"run_{options.command.replace('-', '_')}")(options))
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, Terminated) as error:
        stop = error if isinstance(error, Terminated) else Terminated(signal.SIGINT)
        print(_stop_text(stop), file=sys.stderr)
        return 128 + stop.number
    except TrainingFailed as error:
        code = _print_error(error.__cause__ or error, debug)
        again = f"continue with: stepwrap train {error.config} --resume"
        if error.saved is not None:
            print(f"  the last checkpoint is {error.saved}; {again}", file=sys.stderr)
        if error.aside is not None:
            told = f"{error.aside} has the last update, without its random streams"
            print(f"  {told}; {again} {error.aside}", file=sys.stderr)
        return code
    except Exception as error:
        return _print_error(error, debug)


def _print_error(error: BaseException, debug: bool) -> int:
    """Print what went wrong; returns the exit code."""
    rank = os.environ.get("RANK")
    failures = [Failure.of(error, int(rank) if rank else None)]
    if isinstance(error, LaunchError):
        failures = error.failures
    elif isinstance(error, ConfigError) and rank not in (None, "", "0"):
        # Every rank of torchrun raises the same: rank 0 prints it.
        return MISTAKE
    is_mistake = failures[0].kind == "ConfigError"
    if is_mistake:
        # Most ranks report the same.
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
    """Have Ctrl-C and SIGTERM end this process; SIGHUP and SIGUSR1 count as SIGTERM.

    Raised within an import, as `raising_stops` does it for the work, they might come out as another
    error.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{_stop_text(Terminated(number))}\n".encode())
        os._exit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGTERM: end}
    # Not in the background, and not under nohup.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        handlers[signal.SIGINT] = end
    free = (n for n in COUNT_AS_SIGTERM if signal.getsignal(n) == signal.SIG_DFL)
    handlers |= dict.fromkeys(free, pass_on_as_sigterm)
    with handling(handlers):
        yield


def _stop_text(stop: Terminated) -> str:
    name = "Ctrl-C" if stop.number == signal.SIGINT else str(stop)
    saved = f"the last checkpoint is {stop.saved}" if stop.saved else "nothing was saved"
    return f"stopped by {name}; {saved}"


def _mistake(text: str) -> ConfigError:
    return ConfigError([Problem("", text)])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _mistake(f"{self.prog}: {message}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Turn the words after `stepwrap` into options; `command` is among them."""
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
    name = "version" if argv[0] == "--version" else argv[0]
    if name not in COMMANDS:
        raise _mistake(f"stepwrap: {_unknown('command', name, COMMANDS)}")
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"stepwrap {name}",
        usage=f"stepwrap {name} {command.usage}",
        description=command.help[0].upper() + command.help[1:] + ".",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--debug", help="show the full traceback of an error", **_FLAG)
    for option in command.options:
        others = ["--resume"] if option == "checkpoint" else []
        parser.add_argument(f"--{option}", *others, **_OPTIONS[option])
    options, rest = parser.parse_known_intermixed_args(list(argv[1:]))
    if rest:
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        raise _mistake(f"{parser.prog}: {_unknown('option', rest[0].partition('=')[0], known)}")
    _give_back_words(options)
    problem = ""
    if len(options.words) < command.least:
        problem = f"{command.usage.split()[0]} is missing"
    elif command.most is not None and len(options.words) > command.most:
        problem = f"unexpected argument {options.words[command.most]!r}"
    if problem:
        raise _mistake(f"{parser.prog}: {problem}; usage: {parser.prog} {command.usage}".rstrip())
    options.command = name
    return options


def _print_help() -> None:
    rows = "\n".join(f"  {name:<15}{command.help}" for name, command in COMMANDS.items())
    argparse.ArgumentParser(
        prog="stepwrap",
        usage="stepwrap COMMAND ...",
        description="Train any PyTorch model under any parallelism, from a config.",
        epilog=f"commands:\n{rows}\n\nstepwrap COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(["--help"])


def _give_back_words(options: argparse.Namespace) -> None:
    """`--resume a.b=1` and `--resume cfg.yaml` mean a bare `--resume` and one more word."""
    for name in ("resume", "checkpoint"):
        value = getattr(options, name, None)
        if not isinstance(value, str) or Path(value).is_dir():
            continue
        if "=" in value:
            options.words.append(value)
            setattr(options, name, True)
        elif not options.words or "=" in options.words[0]:
            options.words.insert(0, value)
            setattr(options, name, True)


def _unknown(kind: str, word: str, known: Sequence[str] | dict[str, Command]) -> str:
    near = nearest(word, known, limit=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"there is no {kind} {word}; {hint}"


def _config_of(folder: str) -> str:
    settings = Path(folder) / "config.yaml"
    if not settings.is_file():
        raise _mistake(
            f"stepwrap replay: {folder} is not the folder of a run: no config.yaml in it"
        )
    return str(settings)


def read_run(options: argparse.Namespace) -> Examination | None:
    """Return the config of a command that runs one, with the options laid upon it, examined.

    Mistakes that can be told without any class are, at once: torch is not imported yet.
    """
    needed = COMMANDS[options.command].section
    if needed is None:
        return None
    source, overrides = options.words[0], list(options.words[1:])
    if options.command == "replay":
        source = _config_of(source)
        overrides = [f"run_dir={json.dumps(options.words[0])}", "hooks.progress=false", *overrides]
    for key in ("launch.nproc", "launch.oversubscribe", "launch.max_restarts", "run_dir", "device"):
        value = getattr(options, key.removeprefix("launch."), None)
        if value is not None:
            overrides.append(f"{key}={json.dumps(value)}")
    config = load_config(source, overrides)
    if without := getattr(options, "without_step", None):
        steps = [*(config.select("train.skip_steps") or ()), *without]
        overrides.append(f"train.skip_steps={json.dumps(steps)}")
        config = load_config(source, overrides)
    examined = examine_names(config)
    problems = examined.problems
    if examined.config.select(needed) is None:
        parts = needed.split(".")
        if not any(nearest(one.key.rpartition(".")[2], parts) for one in problems):
            problems.append(Problem(needed, f"{options.command} needs this section, it is missing"))
    if problems:
        raise ConfigError(problems)
    return examined
