"""The commands of the diagnostics, which are the entry points in setup.cfg."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..runner.command.command import (
    DEVICE,
    NPROC,
    OVERSUBSCRIBE,
    RUN,
    Command,
    Options,
    UrlCommand,
    flag,
    from_zero,
    mistake,
    path_name,
    path_or_url,
    positive,
)


class _ReplayCommand(Command):
    """A command that reads the config of a run folder and does not change the folder."""

    def source(self, options: Options) -> tuple[str, list[str]]:
        folder, *overrides = options.words
        settings = Path(folder) / "config.yaml"
        if not settings.is_file():
            problem = f"{folder} is not the folder of a run: it has no config.yaml"
            raise mistake(f"stepwrap replay: {problem}")
        defaults = [f"run_dir={json.dumps(folder)}", "hooks.progress=false"]
        return str(settings), [*defaults, *overrides]


replay = _ReplayCommand(
    "replay",
    f"{__package__}.replay:run_replay",
    "run one step of a run again, from the nearest checkpoint",
    (
        click.Option(
            ["--step"],
            type=positive,
            required=True,
            metavar="K",
            help="the step's number in the log records",
        ),
        click.Option(
            ["--rank"],
            type=from_zero,
            metavar="R",
            help="the rank to examine; default: 0, or all ranks with --anomaly",
        ),
        flag("debugger", "stop before the training step and at an error in it"),
        flag("anomaly", "name the forward call whose gradient is NaN"),
        click.Option(
            ["--profile"],
            type=path_name,
            metavar="FILE",
            help="write a trace of the step for chrome://tracing",
        ),
    ),
    usage="RUN_DIR --step K [key=value ...] [options]",
    section="train",
)
bisect = Command(
    "bisect",
    f"{__package__}.bisect:run_bisect",
    "name the first step, rank and part at which two runs with ledgers differ",
    (flag("no-rerun", "only compare the ledgers, do not train any steps"),),
    usage="RUN_A RUN_B [options]",
    least=2,
    most=2,
)
verify_resume = Command(
    "verify-resume",
    f"{__package__}.verify_resume:run_verify_resume",
    "train, kill and resume; report the first difference from the uninterrupted run",
    (
        NPROC,
        OVERSUBSCRIBE,
        click.Option(["--run-dir"], type=path_name, metavar="DIR", help="the folder for the runs"),
        DEVICE,
        click.Option(
            ["--kill-at"],
            type=positive,
            metavar="K",
            help="the step after which to kill; default: in the middle of an epoch",
        ),
        click.Option(["--then"], type=positive, metavar="M", help="resume on M processes"),
    ),
    usage=f"{RUN} [options]",
    section="train",
)
report = UrlCommand(
    "report",
    f"{__package__}.reports.page:run_report",
    "write an HTML file with curves, settings and facts of runs; it needs no network",
    (
        click.Option(
            ["--out"], type=path_or_url, metavar="FILE", help="the file; default: report.html"
        ),
    ),
    usage="RUN_DIR ... [--out FILE]",
)
serve = Command(
    "serve",
    f"{__package__}.reports.serve:run_serve",
    "show the runs in a folder live in a browser",
    (
        click.Option(
            ["--port"],
            type=from_zero,
            default="8765",
            metavar="N",
            help="the port; 0 for any free one; default: 8765",
        ),
        click.Option(
            ["--host"],
            type=path_name,
            default="127.0.0.1",
            metavar="ADDRESS",
            help="the address to listen on; default: 127.0.0.1, which only this machine reaches",
        ),
    ),
    usage="RUNS_DIR [options]",
    most=1,
)
compare = Command(
    "compare",
    f"{__package__}.reports.compare:run_compare",
    "print the settings that differ between runs, their metrics and speed",
    usage="RUN_A RUN_B ...",
    least=2,
)
