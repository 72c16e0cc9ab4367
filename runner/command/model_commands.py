"""Commands that build parts of a config without training: check, summary, plot, export."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from torch import nn

from ...loops import EpochTrainLoop, IterTrainLoop, SchedulerHook
from ...registry import Config, ConfigError, Examination, Problem, RunSections
from ...wrappers.prepare import freeze_parameters
from ...wrappers.steps.plain_models import BatchMismatchError
from ...wrappers.steps.step import MissingLossError
from ...wrappers.steps.step_checks import has_custom_step
from ..export import FORMATS, Export, ExportError, check_export, export_adapter, export_model
from ..failure import as_mistakes_in, building
from ..finders.schedule import planned_rates
from ..finders.summary import Summary, format_quantity, summarize
from ..parts import Parts, example_batch, plan_run, rehearse
from ..pretrained.build import build_user_model
from ..pretrained.load import add_configured, build_base, load_run_model
from ..sections import read_sections
from .command import Options, mistake, output
from .print_commands import draw_lines, draw_text, plots_available

_MAX_WIDTH = 100


def run_check(examined: Examination, options: Options) -> int:
    """Report every mistake in a config, then build its parts on the CPU."""
    run = read_sections(examined)
    with as_mistakes_in(examined.config):
        parts = rehearse(run)
    model: Any = parts.model.module
    count = sum(parameter.numel() for parameter in model.parameters())
    # fully_shard replaces the class of the model by a subclass.
    kind = next(
        model_class
        for model_class in type(model).__mro__
        if "torch.distributed" not in model_class.__module__
    )
    loops = [] if parts.train_loop is None else ["train"]
    for name, loop in (("val", parts.val_loop), ("test", parts.test_loop)):
        sets = ", ".join(run.data.get_sets(name))
        if loop is not None:
            loops.append(f"{name} ({sets})" if sets else name)
    has_own_step = has_custom_step(parts.model)
    trains = parts.train_loop is not None and not has_own_step
    sizes = list(_size_lines(examined, trains=trains, has_own_step=has_own_step))
    print(f"{options.words[0]}: no mistakes; every part can be built")
    print(f"model: {kind.__name__}, {count:,} parameters")
    print(f"wrapper: {type(parts.model).__name__}")
    for line in sizes:
        print(line)
    print(f"loops: {', '.join(loops) or 'none'}")
    for line in _schedule_lines(parts, examined.config):
        print(line)
    names = [name for name, hook in parts.hooks.items() if hook is not None]
    print(f"hooks: {', '.join(names) or 'none'}")
    return 0


def _schedule_lines(parts: Parts, config: Config) -> Iterator[str]:
    """Yield the length of the training, and the schedules whose lengths differ from it."""
    loop = parts.train_loop
    if not isinstance(loop, (EpochTrainLoop, IterTrainLoop)):
        return
    state = plan_run(loop, parts.optim_wrapper)
    counts = {
        "updates": state.max_steps,
        "epochs": state.max_epochs,
        "batches on each rank": state.max_iterations,
    }
    lengths = [f"{count:,} {unit}" for unit, count in counts.items() if count is not None]
    yield f"training: {', '.join(lengths)}"
    hook = parts.hooks.get("schedulers")
    is_list = isinstance(config.select("schedulers"), list)
    for misfit in hook.misfits(state) if isinstance(hook, SchedulerHook) else ():
        key = f"schedulers.{misfit.position}" if is_list else "schedulers"
        yield f"warning: {Problem(key, misfit.text, config.origin(key))}"


def _size_lines(examined: Examination, *, trains: bool, has_own_step: bool) -> Iterator[str]:
    """Yield the known sizes of the model, then why its forward could not be measured, if so.

    With a custom training step, the forward need not accept ``mode`` or the batch.

    Raises:
        ConfigError: the training data cannot be read or does not fit the model; only raised if
            ``trains`` is true.
    """
    try:
        summary = _make_summary(examined, trains=trains)
    except ConfigError as error:
        if trains:
            raise
        yield f"forward: not measured: {error}"
        return
    if trains and isinstance(summary.error, (BatchMismatchError, MissingLossError)):
        origin = examined.config.origin("data.train")
        raise ConfigError([Problem("data.train", str(summary.error), origin)])
    yield from _summary_lines(summary)
    if summary.error is not None and has_own_step:
        yield "forward: not measured: the training step calls it in its own way"
    elif summary.error is not None:
        yield f"forward: not measured: {type(summary.error).__name__}: {summary.error}"


def run_summary(examined: Examination, options: Options) -> int:
    """Print the layers of a config's model, its parameters and the FLOPs of one batch."""
    # Imported lazily: `check` does not draw a table.
    from rich.console import Console
    from rich.table import Table

    summary = _make_summary(examined)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    table.add_column("class", no_wrap=True, overflow="ellipsis")
    table.add_column("output", no_wrap=True)
    table.add_column("parameters", no_wrap=True, justify="right")
    for layer in summary.layers:
        path = layer.name.split(".")
        if options.depth is None or len(path) <= options.depth:
            shape = "" if layer.shape is None else str(layer.shape)
            name = f"{'  ' * (len(path) - 1)}{path[-1]}"
            table.add_row(name, layer.kind, shape, f"{layer.parameters:,}")
    console = Console(highlight=False)
    console.width = min(console.width, _MAX_WIDTH)
    console.print(table, markup=False)
    for line in _summary_lines(summary):
        print(line)
    if summary.error is None:
        return 0
    message = " ".join(f"{type(summary.error).__name__}: {summary.error}".split())
    print(
        f"the forward of the first batch failed, so shapes are missing: {message}", file=sys.stderr
    )
    return 1


def _make_summary(examined: Examination, *, trains: bool = False) -> Summary:
    """Build the model and the first batch of a config, and summarize the model.

    With ``trains``, the batch is from the training data, and the model must return a loss for it.
    """
    run = read_sections(examined)
    with as_mistakes_in(examined.config):
        batch = example_batch(run, ("train",)) if trains else example_batch(run)
        return summarize(_model(run), batch, has_targets=trains)


def _model(run: RunSections) -> nn.Module:
    model = build_user_model(run.model)
    add_configured(model, run.adapter, None, run.seed)
    if run.train is not None:
        with building("freeze"):
            freeze_parameters(model, run.frozen)
    return model


def _summary_lines(summary: Summary) -> Iterator[str]:
    """Yield the numbers of parameters, and the FLOPs if the forward succeeded."""
    trainable = f"{summary.trainable:,} trainable, {summary.size_bytes / 2**20:.3g} MiB"
    yield f"parameters: {summary.parameters:,} ({trainable})"
    if summary.error is None:
        batch = "the first batch"
        if summary.samples:
            per_sample = format_quantity(summary.flops / summary.samples, "FLOPs")
            batch = f"a batch of {summary.samples}, {per_sample} for one sample"
        yield f"forward: {format_quantity(summary.flops, 'FLOPs')} for {batch}"


def run_plot_schedule(examined: Examination, options: Options) -> int:
    """Draw the learning rates of a config's training, in the terminal or as a picture."""
    if options.out and not plots_available():
        message = "--out needs matplotlib: pip install 'stepwrap[plots]'"
        raise mistake(f"stepwrap plot: {message}; without --out the curve is drawn as text")
    run = read_sections(examined)
    with as_mistakes_in(examined.config):
        parts = rehearse(run)
        with building("train"):
            curves = planned_rates(run, parts)
    if any(scheduler.metric for scheduler in run.schedulers):
        print("ReduceLROnPlateau depends on a metric and is left out", file=sys.stderr)
    drawn: list[list[float]] = []
    for name, curve in curves.items():
        rates = [rate for _, rate in curve]
        highest = max(rates)
        shape = [rate / (highest or 1) for rate in rates]
        # Groups that differ only by a factor have the same curve.
        is_new = not any(map(partial(_is_close, shape), drawn))
        if is_new and not options.out:
            print(*draw_text(curve), sep="\n")
            drawn.append(shape)
        peak = curve[rates.index(highest)][0]
        print(
            f"{name}: {rates[0]:.4g} in update 1, {highest:.4g} in update {peak:,}, "
            f"{rates[-1]:.4g} in update {curve[-1][0]:,}"
        )
    if options.out:
        print(draw_lines(curves, Path(options.out)))
    return 0


def _is_close(curve: Sequence[float], other: Sequence[float]) -> bool:
    return all(isclose(a, b, abs_tol=1e-6) for a, b in zip(curve, other, strict=True))


def run_export(examined: Examination, options: Options) -> int:
    """Export a run's model; print the difference between its outputs and the export's."""
    run = read_sections(examined)
    if options.to is None and options.out is None:
        raise mistake(f"stepwrap export: --to ({', '.join(FORMATS)}) or --out is required")
    name = "peft" if options.to == "peft" else f"model.{options.to}"
    options.out = options.out or f"{run.run_dir}/{name}"
    with output(options) as path:
        _write_export(examined.config, run, path, options)
    return 0


def _write_export(config: Config, run: RunSections, path: Path, options: Options) -> None:
    try:
        if options.to not in (None, "peft", path.suffix.removeprefix(".")):
            raise ValueError(f"--to {options.to} and the suffix of {path.name} differ")
        if options.to == "peft" and run.adapter is None:
            raise ValueError("--to peft writes an adapter, and this run has none; use safetensors")
        check_export(path, "peft" if options.to == "peft" else "")
    except (ValueError, FileExistsError, ImportError) as error:
        raise mistake(f"stepwrap export: {error}") from error
    try:
        export = _export(config, run, path, options=options)
    except ExportError as error:
        raise mistake(f"stepwrap export: {error}") from error
    files = [path] if path.is_file() else [*path.iterdir()]
    print(f"exported: {options.out} ({sum(file.stat().st_size for file in files) / 1e6:.2f} MB)")
    for name, shape in export.inputs.items():
        print(f"input: {name} ({', '.join(map(str, shape))})")
    print(f"largest difference from the model: {export.difference:.2g}")


def _export(config: Config, run: RunSections, path: Path, *, options: Options) -> Export:
    which = options.checkpoint if isinstance(options.checkpoint, str) else ""
    model, adapter = load_run_model(run.run_dir, which)
    with as_mistakes_in(config):
        batch = example_batch(run)
        base = build_base(config.to_dict()) if options.to == "peft" else None
    if adapter is None:
        return export_model(model, path, batch)
    if base is None:
        # Compare with the model as it was trained: a merge may have other outputs.
        live, _ = load_run_model(run.run_dir, which)
        return export_model(adapter.merge(), path, batch, live=live)
    export = export_adapter(adapter, base, path, batch)
    print(f"load it with: peft.PeftModel.from_pretrained({adapter.net or 'model'}, {str(path)!r})")
    return export
