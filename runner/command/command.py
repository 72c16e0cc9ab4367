"""Declare commands: their options, and the config that is read before the body runs.

This module does not import torch, so that the help of every command appears quickly.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, ClassVar

import click
from click.shell_completion import CompletionItem

from ...registry import (
    Config,
    ConfigError,
    Examination,
    Problem,
    did_you_mean,
    examine_names,
    load_config,
    nearest,
)
from ...registry.local_paths import local_path, remote_url, url_problem
from ...registry.text.files import shipped_configs
from ..failure import OversubscribedError, require_cores

# The usage line of a command that runs a config.
RUN = "CONFIG [key=value ...]"
# The command line of a command. Its attributes are the options, the command's name as `command`
# and the positional arguments as `words`. If the command runs a config, there are also `source`
# (the file) and `overrides`.
Options = SimpleNamespace


def mistake(text: str) -> ConfigError:
    """Return the error for a mistake in the command line: one line, exit code 2."""
    return ConfigError([Problem("", text)])


def train_with(options: Options, *overrides: str) -> str:
    """Return the command that trains the config with the same launch options and ``overrides``."""
    flags = [f"--{n}={v}" for n in ("nproc", "device") if (v := vars(options)[n]) is not None]
    flags += ["--oversubscribe"] if options.oversubscribe else []
    return shlex.join(["stepwrap", "train", *options.words, *flags, *overrides])


class Command(click.Command):
    """A command whose body is imported when the command is called. The body returns the exit code.

    Args:
        name: the word after ``stepwrap``.
        body: "module:function", called with ``Options``. If the command has a config, the first
            argument is its ``Examination``: the config with the overrides, its names checked.
        help: one line, without a leading capital or a full stop.
        options: in the order of the help text; ``--debug`` is added to every command.
        usage: the positional arguments, as shown in the help text.
        least: the smallest number of positional arguments.
        most: the largest number of positional arguments; None for any number.
        section: None if the command has no config, or reads its config itself. Otherwise the config
            is the first positional argument, and this is the section that it must have, or "" if
            any config will do.

    Attributes:
        takes_urls: whether the positional arguments may be URLs.
    """

    takes_urls: ClassVar[bool] = False

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
            ["words"], nargs=-1, metavar=usage, required=False, shell_complete=self._proposals
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
        """Return the config to run and its overrides; subclasses may override this."""
        return options.words[0], options.words[1:]

    def _run(self, **params: Any) -> int:
        options = Options(command=self.name, **{**params, "words": list(params["words"])})
        _split_optional_values(options)
        if self.takes_urls:
            options.words = [_strip_file_scheme(word) for word in options.words]
        self._check_words(options.words)
        if self._section is None:
            return int(resolve_name(self._body)(options))
        examined = self._examine(options, self._section)
        return int(resolve_name(self._body)(examined, options))

    def _proposals(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Propose files to a shell; for CONFIG, propose shipped configs if no file matches.

        For an override, propose the settings of the config.
        """
        words = ctx.params.get("words")
        if words and self._usage.startswith(RUN):
            settings = _setting_proposals(words[0], incomplete)
            if settings:
                return settings
        is_config = self._usage.startswith("CONFIG") and not words
        if not is_config or glob.glob(f"{glob.escape(incomplete)}*"):
            return [CompletionItem(incomplete, type="file")]
        names = [name for name in shipped_configs() if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names]

    def _check_words(self, words: list[str]) -> None:
        problem = ""
        if len(words) < self._least:
            problem = f"{self._usage.split()[len(words)]} is missing"
        elif self._most is not None and len(words) > self._most:
            problem = f"unexpected argument {words[self._most]!r}"
        for word in words:
            if not self.takes_urls and (remote := url_problem(word)):
                raise mistake(f"stepwrap {self.name}: {self._usage.split()[0]} {remote}")
        if problem:
            usage = f"stepwrap {self.name} {self._usage}"
            raise mistake(f"stepwrap {self.name}: {problem}; usage: {usage}".rstrip())

    def _examine(self, options: Options, needed: str) -> Examination:
        """Return the config after the command-line options have been applied.

        Mistakes that can be found without importing any class are raised here, before the slow
        import of torch.
        """
        if remote_url(options.words[0]):
            # Imported here, because most commands have no URL.
            from ..remote.configs import fetch_config

            options.words[:1] = fetch_config(options.words[0])
        source, overrides = self.source(options)
        given = vars(options)
        for key in _SETTINGS:
            value = given.get(key.removeprefix("launch."))
            if value is not None:
                overrides.append(f"{key}={json.dumps(value)}")
        config = load_config(source, overrides)
        if given.get("profile") and not config.select("hooks.profile"):
            overrides.append("hooks.profile=true")
            config = load_config(source, overrides)
        if without := given.get("without_step"):
            steps = [*(config.select("train.skip_steps") or ()), *without]
            overrides.append(f"train.skip_steps={json.dumps(steps)}")
            config = load_config(source, overrides)
        options.source, options.overrides = source, overrides
        examined = examine_names(config)
        problems = examined.problems
        if examined.config.select(needed) is None:
            section_names = needed.split(".")
            if not any(
                nearest(problem.key.rpartition(".")[2], section_names) for problem in problems
            ):
                message = f"{self.name} needs this section, but it is missing"
                problems.append(Problem(needed, message))
        if "nproc" in given:
            problems += _too_many_processes(examined.config)
        if problems:
            raise ConfigError(problems)
        return examined


class UrlCommand(Command):
    """A command whose positional arguments may be URLs of runs, checkpoints or files."""

    takes_urls = True


class Subcommands(click.Group):
    """A command that consists of commands, such as ``stepwrap checkpoint ls``.

    Args:
        name: the word after ``stepwrap``.
        help: one line, without a leading capital or a full stop.
        commands: their names begin with ``name``, for example "checkpoint ls".
    """

    def __init__(self, name: str, help: str, commands: Iterable[Command]) -> None:
        super().__init__(
            name,
            {str(command.name).removeprefix(f"{name} "): command for command in commands},
            help=f"{help[0].upper()}{help[1:]}.",
            short_help=help,
            options_metavar="",
            subcommand_metavar="COMMAND ...",
            context_settings=HELP_OPTIONS,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = args or ["--help"]
            if not args[0].startswith("-") and args[0] not in self.commands:
                names = sorted(self.commands)
                hint = did_you_mean(args[0], names, limit=1) or f"; use one of {', '.join(names)}"
                raise mistake(f"stepwrap {self.name}: unknown command {args[0]}{hint}")
        return super().parse_args(ctx, args)


def _too_many_processes(config: Config) -> Iterator[Problem]:
    """Yield the problem of a number of processes that this machine's cores do not allow."""
    nproc = config.select("launch.nproc")
    is_outside = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    if is_outside or not isinstance(nproc, int) or config.select("launch.oversubscribe"):
        return
    try:
        require_cores(nproc)
    except OversubscribedError as error:
        yield Problem("launch.nproc", str(error), config.origin("launch.nproc"))


def _split_optional_values(options: Options) -> None:
    """Put back into ``words`` a config or an override that the parser took as an option's value.

    ``--resume`` and ``--checkpoint`` have optional values, so the parser takes the next word.
    """
    for name in ("resume", "checkpoint"):
        value = vars(options).get(name)
        if not isinstance(value, str) or not value:
            continue
        is_path = os.path.isdir(value) or bool(remote_url(value))
        setattr(options, name, _strip_file_scheme(value))
        if "=" in value and not is_path:
            options.words.append(value)
            setattr(options, name, True)
        elif not options.words or "=" in options.words[0]:
            options.words.insert(0, value)
            setattr(options, name, True)


@contextmanager
def output(options: Options, *, replace: bool = False) -> Iterator[Path]:
    """Yield the path of the new file ``--out``; for a URL, it is uploaded at the end of the block.

    Args:
        options: the command line.
        replace: whether a remote file may be replaced.
    """
    if not remote_url(options.out):
        yield Path(options.out)
        return
    # Imported here, because most commands have no URL.
    from ..remote.outputs import uploaded
    from ..remote.stores import RemoteError

    with ExitStack() as stack:
        try:
            path = stack.enter_context(uploaded(options.out, replace=replace))
        except (FileExistsError, RemoteError) as error:
            raise mistake(f"stepwrap {options.command}: --out: {error}") from error
        yield path


def path_name(text: str) -> str:
    """Return an option's value; raise if it is the next option, or a URL."""
    if problem := url_problem(text):
        raise click.BadParameter(problem)
    return path_or_url(text)


def path_or_url(text: str) -> str:
    """Return an option's value; raise if it is the next option."""
    if text.startswith("-"):
        raise click.BadParameter(f"requires a path, got the option {text}")
    return _strip_file_scheme(text)


def _strip_file_scheme(text: str) -> str:
    """Return the path of a ``file://`` URL; return any other text unchanged."""
    return str(local_path(text)) if re.match("file:/", text, re.IGNORECASE) else text


def positive(text: str) -> int:
    """Convert an option's value to a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"must be a positive integer, got {text!r}")
    return int(text)


def above_zero(text: str) -> float:
    """Convert an option's value to a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise click.BadParameter(f"must be a positive number, got {text!r}")
    return number


def _setting_proposals(source: str, incomplete: str) -> list[CompletionItem]:
    """Propose ``key=`` for the settings of a config file, which is not executed."""
    # Imported here, because only the shell's completion needs it.
    from ...registry.json_schema import setting_paths

    try:
        paths = [] if source.endswith(".py") else setting_paths(load_config(source).to_dict())
    except ConfigError:
        return []
    return [CompletionItem(f"{path}=") for path in paths if path.startswith(incomplete)]


def from_zero(text: str) -> int:
    """Convert an option's value to a non-negative integer."""
    if not text.isdecimal():
        raise click.BadParameter(f"must be a non-negative integer, got {text!r}")
    return int(text)


def _steps(text: str) -> int | str:
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", text):
        message = f"must be a step number or a range such as 1200-1210, got {text!r}"
        raise click.BadParameter(message)
    return int(text) if text.isdecimal() else text


def flag(name: str, help: str) -> click.Option:
    """Return a boolean option."""
    return click.Option([f"--{name}"], is_flag=True, help=help)


def _path(*names: str, help: str) -> click.Option:
    """Return an option whose value may be omitted; it is True then."""
    return click.Option(
        names, is_flag=False, flag_value=True, type=click.UNPROCESSED, metavar="[PATH]", help=help
    )


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
DEBUG = flag("debug", "show the full traceback of an error")
# Config settings that a command-line option of the same name replaces.
_SETTINGS = (
    *("launch.nproc", "launch.oversubscribe", "launch.max_restarts", "run_dir", "device"),
    *("limit_batches", "overfit"),
)
NPROC = click.Option(
    ["--nproc"], type=positive, metavar="N", help="processes on this machine (launch.nproc)"
)
OVERSUBSCRIBE = click.Option(
    ["--oversubscribe"],
    is_flag=True,
    # None keeps the config's value.
    default=None,
    help="start more processes than cores and memory allow (launch.oversubscribe)",
)
RUN_DIR = click.Option(
    ["--run-dir"], type=path_or_url, metavar="DIR", help="the run's folder or its URL (run_dir)"
)
DEVICE = click.Option(
    ["--device"], type=click.Choice(["auto", "cpu", "cuda", "xpu", "mps"]), help="where to compute"
)
DRY_RUN = flag("dry-run", "run one step of everything, and keep nothing")
MAX_RESTARTS = click.Option(
    ["--max-restarts"],
    type=from_zero,
    metavar="N",
    help="restart all ranks from the last checkpoint when one dies (launch.max_restarts)",
)
RESUME = _path(
    "--resume", help="continue the run in the run folder, or from the checkpoint PATH: name or path"
)
FRESH = flag("fresh", "delete the existing checkpoints and records in the run folder")
LIMIT_BATCHES = click.Option(
    ["--limit-batches"],
    type=positive,
    metavar="N",
    help="read at most N batches in each pass (limit_batches)",
)
OVERFIT = click.Option(
    ["--overfit"],
    type=positive,
    metavar="N",
    help="train and evaluate on N batches of the training data only (overfit)",
)
PROFILE = flag("profile", "profile some steps, and print the costliest operations (hooks.profile)")
WITHOUT_STEP = click.Option(
    ["--without-step"],
    type=_steps,
    multiple=True,
    metavar="K",
    help="skip step K, or steps K-L (train.skip_steps); can be repeated",
)
CHECKPOINT = _path(
    "--checkpoint",
    "--resume",
    "checkpoint",
    help="a checkpoint's name or path, best or latest; default: best if it exists, or latest",
)
