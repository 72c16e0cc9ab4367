"""Declare commands: their options, and the config that is read before the body runs.

Importing this imports no torch: the help of all commands answers at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import click

from ...registry import ConfigError, Examination, Problem, examine_names, load_config, nearest

# How the arguments of a command that runs a config are shown.
RUN = "CONFIG [key=value ...]"
# The argument of a body: options, other words as `words`, the examined config as `examined`.
Options = SimpleNamespace


def mistake(text: str) -> ConfigError:
    """Return the error for a mistake in the command line, which is one line and exit code 2."""
    return ConfigError([Problem("", text)])


class Command(click.Command):
    """A command whose body is imported when it is called, and returns the exit code.

    Args:
        name: The word after `stepwrap`.
        body: "module:function", called with `Options`.
        help: One line, without a capital at its start or a full stop.
        options: In the order of the help; each command has `--debug` too.
        usage: The words it takes, as they are shown.
        least: How many words it takes at least.
        most: How many words it takes at most; None for any number.
        section: Of a command that runs a config, the section that it cannot do without, "" for
            any; the first word is the config. None for a command that runs none.
    """

    def __init__(
        self,
        name: str,
        body: str,
        help: str,
        options: Iterable[click.Option] = (),
        *,
        usage: str,
        least: int = 1,
        most: int | None = None,
        section: str | None = None,
    ) -> None:
        words = click.Argument(
            ["words"], nargs=-1, metavar=usage, type=click.Path(readable=False), required=False
        )
        super().__init__(
            name,
            callback=self._run,
            params=[words, *options, DEBUG],
            help=f"{help[0].upper()}{help[1:]}.",
            short_help=help,
            options_metavar="",
            context_settings=HELP_OPTIONS,
        )
        self._body, self._usage, self._section = body, usage, section
        self._least, self._most = least, most

    def source(self, options: Options) -> tuple[str, list[str]]:
        """Return the config to run and its overrides; a subclass may find them elsewhere."""
        return options.words[0], options.words[1:]

    def _run(self, **given: Any) -> int:
        options = Options(command=self.name, **{**given, "words": list(given["words"])})
        _give_back_words(options)
        self._check_words(options.words)
        if self._section is not None:
            options.examined = self._examine(options, self._section)
        return int(resolve_name(self._body)(options))

    def _check_words(self, words: list[str]) -> None:
        problem = ""
        if len(words) < self._least:
            problem = f"{self._usage.split()[0]} is missing"
        elif self._most is not None and len(words) > self._most:
            problem = f"unexpected argument {words[self._most]!r}"
        if problem:
            usage = f"stepwrap {self.name} {self._usage}"
            raise mistake(f"stepwrap {self.name}: {problem}; usage: {usage}".rstrip())

    def _examine(self, options: Options, needed: str) -> Examination:
        """Return the config with the options laid upon it.

        Mistakes that can be found without any class are raised at once: torch is not imported yet.
        """
        source, overrides = self.source(options)
        given = vars(options)
        for key in _SETTINGS:
            value = given.get(key.removeprefix("launch."))
            if value is not None:
                overrides.append(f"{key}={json.dumps(value)}")
        config = load_config(source, overrides)
        if without := given.get("without_step"):
            steps = [*(config.select("train.skip_steps") or ()), *without]
            overrides.append(f"train.skip_steps={json.dumps(steps)}")
            config = load_config(source, overrides)
        examined = examine_names(config)
        problems = examined.problems
        if examined.config.select(needed) is None:
            parts = needed.split(".")
            if not any(nearest(one.key.rpartition(".")[2], parts) for one in problems):
                what = f"{self.name} needs this section, it is missing"
                problems.append(Problem(needed, what))
        if problems:
            raise ConfigError(problems)
        return examined


def _give_back_words(options: Options) -> None:
    """Read `--resume a.b=1` and `--resume cfg.yaml` as a bare `--resume` and one more word."""
    for name in ("resume", "checkpoint"):
        value = vars(options).get(name)
        if not isinstance(value, str) or not value or os.path.isdir(value):
            continue
        if "=" in value:
            options.words.append(value)
            setattr(options, name, True)
        elif not options.words or "=" in options.words[0]:
            options.words.insert(0, value)
            setattr(options, name, True)


def path_name(text: str) -> str:
    """Return an option's value, which must not be the next option."""
    if text.startswith("-"):
        raise click.BadParameter(f"requires a path, got the option {text}")
    return text


def positive(text: str) -> int:
    """Return a whole number from 1, of an option's value."""
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"must be a whole number from 1, got {text!r}")
    return int(text)


def from_zero(text: str) -> int:
    """Return a whole number from 0, of an option's value."""
    if not text.isdecimal():
        raise click.BadParameter(f"must be a whole number from 0, got {text!r}")
    return int(text)


def _steps(text: str) -> int | str:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", text):
        what = f"must be the number of a step, or a range such as 1200-1210, got {text!r}"
        raise click.BadParameter(what)
    return int(text) if text.isdecimal() else text


def flag(name: str, help: str) -> click.Option:
    """Return an option without a value."""
    return click.Option([f"--{name}"], is_flag=True, help=help)


def _path(*names: str, help: str) -> click.Option:
    """Return an option whose value may be left out, and is True then."""
    return click.Option(
        names, is_flag=False, flag_value=True, type=click.UNPROCESSED, metavar="[PATH]", help=help
    )


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
DEBUG = flag("debug", "show the full traceback of an error")
# Settings of the config that options of the same name replace.
_SETTINGS = ("launch.nproc", "launch.oversubscribe", "launch.max_restarts", "run_dir", "device")
NPROC = click.Option(
    ["--nproc"], type=positive, metavar="N", help="processes on this machine (launch.nproc)"
)
OVERSUBSCRIBE = click.Option(
    ["--oversubscribe"],
    is_flag=True,
    # None leaves the config's value.
    default=None,
    help="start more processes than cores and memory have room for (launch.oversubscribe)",
)
RUN_DIR = click.Option(
    ["--run-dir"], type=path_name, metavar="DIR", help="the run's folder (run_dir)"
)
DEVICE = click.Option(
    ["--device"], type=click.Choice(["auto", "cpu", "cuda"]), help="where to compute"
)
DRY_RUN = flag("dry-run", "one step of everything; nothing is kept")
MAX_RESTARTS = click.Option(
    ["--max-restarts"],
    type=from_zero,
    metavar="N",
    help="restart all ranks from the last checkpoint when one dies (launch.max_restarts)",
)
RESUME = _path(
    "--resume", help="continue the run in the run folder, or from the checkpoint at PATH"
)
FRESH = flag("fresh", "delete the results already in the run folder")
WITHOUT_STEP = click.Option(
    ["--without-step"],
    type=_steps,
    multiple=True,
    metavar="K",
    help="leave out step K, or steps K-L (train.skip_steps); may be given several times",
)
CHECKPOINT = _path(
    "--checkpoint",
    "--resume",
    "checkpoint",
    help="a checkpoint's folder, best or latest; default: the best, else the latest",
)
