"""The runner's commands, which the entry points in setup.cfg name."""

from __future__ import annotations

import click

from .command import (
    CHECKPOINT,
    DEVICE,
    DRY_RUN,
    FRESH,
    MAX_RESTARTS,
    NPROC,
    OVERSUBSCRIBE,
    RESUME,
    RUN,
    RUN_DIR,
    WITHOUT_STEP,
    Command,
    flag,
    positive,
)

_RUNS = f"{__package__}.run_commands"
_PRINTS = f"{__package__}.print_commands"
_RUNNING = (NPROC, OVERSUBSCRIBE, RUN_DIR, DEVICE, DRY_RUN)

train = Command(
    "train",
    f"{_RUNS}:run_train",
    "train and validate, then test if data.test is set",
    (*_RUNNING, MAX_RESTARTS, RESUME, FRESH, WITHOUT_STEP),
    usage=f"{RUN} [options]",
    section="train",
)
validate = Command(
    "validate",
    f"{_RUNS}:run_validate",
    "evaluate a checkpoint on data.val",
    (*_RUNNING, CHECKPOINT),
    usage=f"{RUN} [options]",
    section="data.val",
)
test = Command(
    "test",
    f"{_RUNS}:run_validate",
    "evaluate a checkpoint on data.test",
    (*_RUNNING, CHECKPOINT),
    usage=f"{RUN} [options]",
    section="data.test",
)
check = Command(
    "check",
    f"{_RUNS}:run_check",
    "report every mistake in a config and build its parts on the CPU",
    usage=RUN,
    section="",
)
env = Command(
    "env",
    f"{_RUNS}:run_env",
    "print versions and devices, for a bug report",
    usage="",
    least=0,
    most=0,
)
show = Command(
    "show",
    f"{_PRINTS}:run_show",
    "print the resolved config",
    (flag("origin", "show which line or override set each value"),),
    usage=f"{RUN} [--origin]",
)
list_registries = Command(
    "list",
    f"{_PRINTS}:run_list",
    "list the types that a config can name",
    usage="[REGISTRY]",
    least=0,
    most=1,
)
plot = Command(
    "plot", f"{_PRINTS}:run_plot", "draw curves.png in each RUN_DIR", usage="RUN_DIR ..."
)
convert = Command(
    "convert",
    f"{_PRINTS}:run_convert",
    "convert an mmengine config (executes it) and print the result",
    (
        click.Option(
            ["--epoch-length"],
            type=positive,
            metavar="N",
            help="batches in an epoch, for schedules with convert_to_iter_based",
        ),
        flag("keep-order", "read the data with mmengine's loaders, in the same order"),
    ),
    usage="MMENGINE_CONFIG.py [options]",
    most=1,
)
version = Command(
    "version",
    f"{_PRINTS}:run_version",
    "print the version (also: --version)",
    usage="",
    least=0,
    most=0,
)
