"""The runner's commands, which the entry points in setup.cfg name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...registry import Config, did_you_mean, load_config, sets_in
from .command import (
    CHECKPOINT,
    DEVICE,
    DRY_RUN,
    FRESH,
    LIMIT_BATCHES,
    MAX_RESTARTS,
    NPROC,
    OVERFIT,
    OVERSUBSCRIBE,
    PROFILE,
    RESUME,
    RUN,
    RUN_DIR,
    WITHOUT_STEP,
    Command,
    Options,
    Subcommands,
    UrlCommand,
    above_zero,
    flag,
    mistake,
    path_name,
    path_or_url,
    positive,
)

_RUNS = f"{__package__}.run_commands"
_PRINTS = f"{__package__}.print_commands"
_CONFIGS = f"{__package__}.config_commands"
_MODELS = f"{__package__}.model_commands"
_CHECKPOINTS = f"{__package__}.checkpoint_commands"
_WEIGHTS = f"{__package__}.weight_commands"
_PREDICTING = (NPROC, OVERSUBSCRIBE, RUN_DIR, DEVICE)
_RUNNING = (*_PREDICTING, DRY_RUN)

train = UrlCommand(
    "train",
    f"{_RUNS}:run_train",
    "train and validate, then test if data.test is set",
    (*_RUNNING, MAX_RESTARTS, RESUME, FRESH, WITHOUT_STEP, OVERFIT, LIMIT_BATCHES, PROFILE),
    usage=f"{RUN} [options]",
    section="train",
)
validate = UrlCommand(
    "validate",
    f"{_RUNS}:run_validate",
    "evaluate a checkpoint on data.val",
    (*_RUNNING, CHECKPOINT),
    usage=f"{RUN} [options]",
    section="data.val",
)
test = UrlCommand(
    "test",
    f"{_RUNS}:run_validate",
    "evaluate a checkpoint on data.test",
    (*_RUNNING, CHECKPOINT),
    usage=f"{RUN} [options]",
    section="data.test",
)


class _PredictCommand(Command):
    """A command that can read other data instead of the test data."""

    takes_urls = True

    def source(self, options: Options) -> tuple[str, list[str]]:
        """Return the config and its overrides, with the section of ``--data`` as ``data.test``."""
        source, overrides = super().source(options)
        data = options.data or "test"
        name, _, set_name = data.partition(".")
        if name in ("train", "val", "test") and not data.endswith((".yaml", ".yml")):
            section = _data_in(load_config(source, overrides)).get(name)
            if section is None:
                message = f"the config has no data.{name}; choose other data with --data"
                raise mistake(f"stepwrap predict: {message}")
            section = _one_set(name, set_name, section)
            if name == "test" and not set_name:
                return source, overrides
            if "type" not in section:
                # build_loader builds this loader. Make it read each sample once, in order.
                section |= {"shuffle": False, "drop_last": False}
        else:
            hint = did_you_mean(data, ("train", "val", "test"))
            if hint and not Path(data).exists():
                message = f"--data: there is no file {data}, and no such section of data{hint}"
                raise mistake(f"stepwrap predict: {message}")
            section = _section_in(data)
        return source, [f"data.test={json.dumps({'_delete_': True, **section})}", *overrides]


def _one_set(name: str, set_name: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the set ``set_name`` of ``data.<name>``; for "", the section if it has no sets."""
    sets = sets_in({"data": {name: section}}).get(name, {})
    if set_name in sets or not (set_name or sets):
        return dict(sets.get(set_name, section))
    choices = ", ".join(f"--data {name}.{candidate}" for candidate in sets) or f"--data {name}"
    if not set_name:
        raise mistake(f"stepwrap predict: data.{name} has several sets; choose one: {choices}")
    hint = did_you_mean(set_name, sets)
    raise mistake(
        f"stepwrap predict: data.{name} has no set {set_name!r}{hint}; there is: {choices}"
    )


def _section_in(path: str) -> dict[str, Any]:
    """Return the section ``data.test`` of a file; the whole file if it has no ``data``."""
    config = load_config(path)
    if "data" not in config:
        # load_config adds a name to every config, and a data section has none.
        return {key: value for key, value in config.to_dict().items() if key != "name"}
    section: dict[str, Any] | None = _data_in(config).get("test")
    if section is None:
        raise mistake(f"stepwrap predict: --data: {path} has no data.test")
    return section


def _data_in(config: Config) -> dict[str, Any]:
    return config.to_dict().get("data") or {}


predict = _PredictCommand(
    "predict",
    f"{_RUNS}:run_predict",
    "write predictions for each sample of data.test to a file",
    (
        click.Option(
            ["--out"],
            type=path_or_url,
            required=True,
            metavar="FILE",
            help="the new file: .jsonl, .parquet or .npz",
        ),
        click.Option(
            ["--data"],
            type=path_name,
            metavar="NAME",
            help="train, val, test or a set such as val.noisy; or a YAML file with such a section",
        ),
        *_PREDICTING,
        CHECKPOINT,
    ),
    usage=f"{RUN} --out FILE [options]",
    section="data.test",
)
export = UrlCommand(
    "export",
    f"{_MODELS}:run_export",
    "write the trained model to a file for other programs",
    (
        click.Option(
            ["--to"],
            type=click.Choice(["safetensors", "pt2", "onnx", "peft"]),
            help="the format: weights, torch.export, ONNX, an adapter alone; default: the suffix",
        ),
        click.Option(
            ["--out"],
            type=path_or_url,
            metavar="FILE",
            help="the new file; default: model.FORMAT, or peft, in the run's folder",
        ),
        RUN_DIR,
        CHECKPOINT,
    ),
    usage=f"{RUN} --to FORMAT [options]",
    section="data",
)
init = Command(
    "init",
    f"{_CONFIGS}:run_init",
    "create a project with a config, a model, data and a test",
    (
        click.Option(
            ["--name"], type=path_name, metavar="NAME", help="its name; default: the folder's name"
        ),
    ),
    usage="DIR [--name NAME]",
    most=1,
)
_TRYING = (NPROC, OVERSUBSCRIBE, DEVICE)
lr_find = Command(
    "lr-find",
    f"{__package__}.finder_commands:run_lr_find",
    "train with a rising learning rate, and suggest one",
    (
        click.Option(
            ["--low"],
            type=above_zero,
            default="1e-7",
            metavar="RATE",
            help="the first learning rate; default: 1e-7",
        ),
        click.Option(
            ["--high"],
            type=above_zero,
            default="10",
            metavar="RATE",
            help="the last learning rate; default: 10",
        ),
        click.Option(
            ["--steps"],
            type=positive,
            default="100",
            metavar="N",
            help="number of updates; default: 100",
        ),
        click.Option(
            ["--optimizer"],
            type=path_name,
            metavar="NAME",
            help="the optimizer whose rate rises, if there are several; default: the first",
        ),
        click.Option(
            ["--out"],
            type=path_name,
            metavar="FILE",
            help="the picture of the curve; default: lr_find.png",
        ),
        *_TRYING,
    ),
    usage=f"{RUN} [options]",
    section="train",
)
batch_size_find = Command(
    "batch-size-find",
    f"{__package__}.finder_commands:run_batch_size_find",
    "find the largest batch size that fits into memory",
    (
        click.Option(
            ["--max-size"],
            type=positive,
            metavar="N",
            help="the largest batch size to try",
        ),
        click.Option(
            ["--memory-gib"],
            type=above_zero,
            metavar="G",
            help="limit the address space of each process, for runs on the CPU",
        ),
        *_TRYING,
    ),
    usage=f"{RUN} [options]",
    section="train",
)
summary = Command(
    "summary",
    f"{_MODELS}:run_summary",
    "print the model's layers, shapes, parameters and FLOPs",
    (
        click.Option(
            ["--depth"],
            type=positive,
            metavar="N",
            help="show only layers whose path has at most N parts; default: all layers",
        ),
    ),
    usage=RUN,
    section="data",
)
check = Command(
    "check",
    f"{_MODELS}:run_check",
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
schema = Command(
    "schema",
    f"{_PRINTS}:run_schema",
    "print a JSON schema of configs, with which editors complete and check them",
    usage="",
    least=0,
    most=0,
)
list_registries = Command(
    "list",
    f"{_PRINTS}:run_list",
    "list the types that a config can name",
    usage="[REGISTRY]",
    least=0,
    most=1,
)


class _PlotCommand(Command):
    """A command that draws finished runs, or with ``--schedule`` a config."""

    def _run(self, **params: Any) -> int:
        if params["schedule"]:
            return _plot_schedule._run(**params)
        if params["out"]:
            raise mistake("stepwrap plot: --out needs --schedule; a run gets curves.png")
        return super()._run(**params)


_PLOTTING = (
    flag("schedule", "draw the learning rates of CONFIG before it runs"),
    click.Option(
        ["--out"],
        type=path_name,
        metavar="FILE",
        help="with --schedule: a picture instead of text in the terminal",
    ),
)
_plot_schedule = Command(
    "plot", f"{_MODELS}:run_plot_schedule", "draw learning rates", usage=RUN, section="train"
)
plot = _PlotCommand(
    "plot",
    f"{_PRINTS}:run_plot",
    "draw curves.png in each RUN_DIR, or the learning rates of a config",
    _PLOTTING,
    usage="RUN_DIR ... | CONFIG [key=value ...] --schedule",
)
sweep = Command(
    "sweep",
    f"{__package__}.sweep_command:run_sweep",
    "search for the best values of settings, with a run for each trial",
    (
        click.Option(
            ["--space"],
            type=path_name,
            required=True,
            metavar="FILE",
            help="a YAML file that maps settings to the values to try",
        ),
        click.Option(
            ["--trials"],
            type=positive,
            default="20",
            metavar="N",
            help="total number of trials, also of a resumed sweep; default: 20",
        ),
        click.Option(
            ["--metric"],
            metavar="NAME",
            help="a validation metric; default: keep_best of the checkpoint hook, or the first",
        ),
        click.Option(
            ["--mode"],
            type=click.Choice(["max", "min"]),
            help="whether higher values of it are better; default: known from the metric",
        ),
        click.Option(
            ["--folder"],
            type=path_name,
            metavar="DIR",
            help="the sweep's folder; default: sweeps/NAME, with the config's name",
        ),
        flag("resume", "continue the sweep in its folder"),
        flag("no-prune", "run all trials to their end"),
        NPROC,
        OVERSUBSCRIBE,
        DEVICE,
    ),
    usage=f"{RUN} --space FILE [options]",
    section="data.val",
)
convert = Command(
    "convert",
    f"{_CONFIGS}:run_convert",
    "convert an mmengine config (executes it) and print the result",
    (
        click.Option(
            ["--epoch-length"],
            type=positive,
            metavar="N",
            help="batches in an epoch of each process, for schedules with convert_to_iter_based",
        ),
        flag("keep-order", "read the data with mmengine's loaders, in the same order"),
    ),
    usage="MMENGINE_CONFIG.py [options]",
    most=1,
)
_JSON = flag("json", "print JSON instead of a table")
_PATTERN = click.Option(
    ["--weights"], metavar="PATTERN", help='only weights whose names match, such as "net.0.*"'
)
_EVALUATED = flag("evaluated", "take the weights that evaluations used, such as EMA averages")
_FORCE = flag("force", "replace the file --out if it exists")
_OUT = click.Option(
    ["--out"],
    type=path_or_url,
    required=True,
    metavar="FILE",
    help="the new file: .safetensors, or .pt, .pth, .bin or .ckpt for torch.load",
)
checkpoint = Subcommands(
    "checkpoint",
    "list, compare, average, convert or remove checkpoints",
    (
        UrlCommand(
            "checkpoint ls",
            f"{_CHECKPOINTS}:run_ls",
            "list the checkpoints of a run",
            (_JSON,),
            usage="RUN [--json]",
            most=1,
        ),
        UrlCommand(
            "checkpoint inspect",
            f"{_CHECKPOINTS}:run_inspect",
            "print the weights and the other contents of a checkpoint, or of a file of weights",
            (
                _PATTERN,
                click.Option(
                    ["--depth"],
                    type=positive,
                    metavar="N",
                    help="print totals of modules whose path has at most N parts",
                ),
                _JSON,
            ),
            usage="PATH [options]",
            most=1,
        ),
        UrlCommand(
            "checkpoint diff",
            f"{_CHECKPOINTS}:run_diff",
            "print the weights and states that differ; exit with 1 if any do",
            (_PATTERN, _JSON),
            usage="A B [options]",
            least=2,
            most=2,
        ),
        UrlCommand(
            "checkpoint verify",
            f"{_CHECKPOINTS}:run_verify",
            "check the hashes of a checkpoint, or of all checkpoints of a run",
            (_JSON,),
            usage="PATH [--json]",
            most=1,
        ),
        UrlCommand(
            "checkpoint prune",
            f"{_CHECKPOINTS}:run_prune",
            "list the checkpoints that no rule keeps; with --yes, remove them",
            (
                click.Option(
                    ["--keep-last"],
                    type=positive,
                    metavar="N",
                    help="keep the latest N checkpoints",
                ),
                flag("keep-best", "keep the best checkpoint"),
                click.Option(
                    ["--keep"],
                    multiple=True,
                    metavar="PATTERN",
                    help='keep checkpoints whose names match, such as "step_000*"; can be repeated',
                ),
                flag("unprotected", "remove the latest and the best too, if no rule keeps them"),
                flag("yes", "remove the checkpoints, instead of listing them"),
                _JSON,
            ),
            usage="RUN --keep-last N [options]",
            most=1,
        ),
        UrlCommand(
            "checkpoint average",
            f"{_WEIGHTS}:run_average",
            "average the weights of checkpoints or files",
            (
                click.Option(
                    ["--out"],
                    type=path_or_url,
                    required=True,
                    metavar="FILE",
                    help="the new file, which ends in .safetensors, or a new folder",
                ),
                _EVALUATED,
                _FORCE,
            ),
            usage="A B ... --out FILE|FOLDER [options]",
            least=2,
        ),
        UrlCommand(
            "checkpoint convert",
            f"{_WEIGHTS}:run_convert",
            "write the weights of a checkpoint, or of another program's file, to a file",
            (
                _OUT,
                click.Option(
                    ["--to"],
                    type=click.Choice(["safetensors", "torch"]),
                    help="the format; default: the suffix of --out",
                ),
                _EVALUATED,
                flag(
                    "unsafe",
                    "unpickle the file, which runs code that is in it: only for files you trust",
                ),
                _FORCE,
            ),
            usage="PATH --out FILE [options]",
            most=1,
        ),
        UrlCommand(
            "checkpoint consolidate",
            f"{_WEIGHTS}:run_consolidate",
            "write a divided or sharded model to one file",
            (_OUT, _FORCE),
            usage="PATH --out FILE [--force]",
            most=1,
        ),
    ),
)
version = Command(
    "version",
    f"{_PRINTS}:run_version",
    "print the version (also: --version)",
    usage="",
    least=0,
    most=0,
)
