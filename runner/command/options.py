"""The words of the command line: commands, options, and near misses of both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...registry import Config, ConfigError, Problem, load_config, name_problems, nearest

_RUN = "CONFIG [key=value ...]"


class UsageError(Exception):
    """A command line that cannot be understood; the text says what to write instead."""


@dataclass(frozen=True)
class Command:
    """One word after `stepwrap`, which takes `least` to `most` (None: any number of) others."""

    usage: str
    help: str
    home: str  # the module here that holds its function
    options: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    # Of the config of a run, what the command cannot do without; "" for any.
    section: str | None = None


_RUNNING = ("nproc", "run-dir", "device", "dry-run")
COMMANDS = {
    "train": Command(
        f"{_RUN} [options]",
        "train, validate and, where data.test is given, test",
        "run_commands",
        (*_RUNNING, "resume", "fresh"),
        section="train",
    ),
    "validate": Command(
        f"{_RUN} [options]",
        "evaluate a checkpoint on data.val",
        "run_commands",
        (*_RUNNING, "checkpoint"),
        section="data.val",
    ),
    "test": Command(
        f"{_RUN} [options]",
        "evaluate a checkpoint on data.test",
        "run_commands",
        (*_RUNNING, "checkpoint"),
        section="data.test",
    ),
    "check": Command(
        _RUN,
        "report every mistake in a config and build its parts on the CPU",
        "run_commands",
        section="",
    ),
    "show": Command(f"{_RUN} [--origin]", "print the resolved config", "commands", ("origin",)),
    "list": Command("[REGISTRY]", "print what a config can name", "commands", (), 0, 1),
    "convert": Command(
        "MMENGINE_CONFIG.py [options]",
        "print a config of mmengine, which is executed for that, as one of ours",
        "commands",
        ("epoch-length", "keep-order"),
        most=1,
    ),
    "plot": Command("RUN_DIR ...", "draw curves.png in each RUN_DIR", "commands"),
    "env": Command("", "print versions and devices, for a bug report", "run_commands", (), 0, 0),
    "version": Command("", "print the version; so does --version", "commands", (), 0, 0),
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


_FLAG: dict[str, Any] = {"action": "store_true"}
_PATH: dict[str, Any] = {"nargs": "?", "const": True, "metavar": "PATH"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "nproc": {
        "type": _positive,
        "metavar": "N",
        "help": "processes on this machine (launch.nproc)",
    },
    "run-dir": {"metavar": "DIR", "help": "the run's folder (run_dir)"},
    "device": {"choices": ("auto", "cpu", "cuda"), "help": "where to compute"},
    "dry-run": {**_FLAG, "help": "one step of everything; nothing is kept"},
    "resume": {
        **_PATH,
        "help": "continue the run in the run folder, or from the checkpoint at PATH",
    },
    "fresh": {**_FLAG, "help": "delete the results already in the run folder"},
    "checkpoint": {
        **_PATH,
        "help": "a checkpoint's folder, best or latest; default: the best, else the latest",
    },
    "origin": {**_FLAG, "help": "say which line or override set each value"},
    "epoch-length": {
        "type": _positive,
        "metavar": "N",
        "help": "batches in an epoch, for schedules with convert_to_iter_based",
    },
    "keep-order": {**_FLAG, "help": "read the data by mmengine's own loaders, in its order"},
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Turn the words after `stepwrap` into options; `command` is among them."""
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
    name = "version" if argv[0] == "--version" else argv[0]
    if name not in COMMANDS:
        raise UsageError(f"stepwrap: {_unknown('command', name, COMMANDS)}")
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
        raise UsageError(f"{parser.prog}: {_unknown('option', rest[0].partition('=')[0], known)}")
    _give_back_words(options)
    problem = ""
    if len(options.words) < command.least:
        problem = f"{command.usage.split()[0]} is missing"
    elif command.most is not None and len(options.words) > command.most:
        problem = f"unexpected argument {options.words[command.most]!r}"
    if problem:
        raise UsageError(f"{parser.prog}: {problem}; usage: {parser.prog} {command.usage}".rstrip())
    options.command = name
    return options


def _print_help() -> None:
    rows = "\n".join(f"  {name:<10}{command.help}" for name, command in COMMANDS.items())
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


def read_run(options: argparse.Namespace) -> Config | None:
    """Return the config of a command that runs one, with the options laid upon it.

    Raises:
        ConfigError: it cannot be read, or has mistakes that can be told without any class: with
            torch not imported yet, these are told at once.
    """
    needed = COMMANDS[options.command].section
    if needed is None:
        return None
    overrides = list(options.words[1:])
    for name, key in (("nproc", "launch.nproc"), ("run_dir", "run_dir"), ("device", "device")):
        value = getattr(options, name, None)
        if value is not None:
            overrides.append(f"{key}={json.dumps(value)}")
    config = load_config(options.words[0], overrides)
    problems = name_problems(config)
    if needed and config.select(needed) is None:
        problems.append(Problem(needed, f"{options.command} needs this section, it is missing"))
    if problems:
        raise ConfigError(problems)
    return config
