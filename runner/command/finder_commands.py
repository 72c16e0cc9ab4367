"""The commands that find a learning rate and a batch size."""

from __future__ import annotations

from pathlib import Path

from ...registry import (
    ConfigError,
    Examination,
    LoaderSection,
    Problem,
    RunSections,
    did_you_mean,
)
from ..finders.batch_size import BatchSizeFit, largest_batch_size, try_batch_size
from ..finders.learning_rate import draw_range_test, optimizer_names, run_range_test
from ..jobs import on_ranks
from ..launcher import started_outside
from ..rank_processes import raising_stops
from ..sections import read_sections
from .command import Options, mistake, train_with
from .print_commands import plots_available

_ROWS = 12


def run_lr_find(examined: Examination, options: Options) -> int:
    """Train with a rising learning rate; print and draw the losses, and suggest a rate."""
    run = _read_training(examined, options.command)
    names = optimizer_names(run.optimizer)
    name = options.optimizer or names[0]
    if name not in names:
        hint = did_you_mean(name, names) or f"; there is {', '.join(names)}"
        raise mistake(f"stepwrap lr-find: --optimizer: there is no optimizer {name!r}{hint}")
    if not 0 < options.low < options.high:
        message = (
            f"--low must be above 0 and below --high, got {options.low:g} and {options.high:g}"
        )
        raise mistake(f"stepwrap lr-find: {message}")
    with raising_stops():
        results = on_ranks(
            run,
            run_range_test,
            *(examined.config, run),
            low=options.low,
            high=options.high,
            steps=options.steps,
            optimizer=name,
            debug=options.debug,
        )
    result = results[0]
    print("learning rate   loss")
    for at in range(0, len(result.rates), max(1, len(result.rates) // _ROWS)):
        print(f"{result.rates[at]:<13.2e}   {result.losses[at]:.4g}")
    if result.diverged:
        print("the test ended early because the loss diverged")
    if plots_available():
        path = Path(options.out or "lr_find.png")
        draw_range_test(result, path)
        print(f"curve: {path}")
    else:
        print("no curve: drawing needs matplotlib, pip install 'stepwrap[plots]'")
    if result.suggestion is None:
        print("no suggestion: the loss does not fall in this range; try another --low or --high")
        return 1
    key = f"optimizer.{name}.lr" if name else "optimizer.lr"
    print(f"suggestion: {result.suggestion:.2g}, where the loss falls fastest")
    print(f"train with it: {train_with(options, f'{key}={result.suggestion:.2g}')}")
    return 0


def run_batch_size_find(examined: Examination, options: Options) -> int:
    """Try batch sizes in short trainings; print the largest tried size that fits into memory."""
    run = _read_training(examined, options.command)
    section = run.data.train
    if not isinstance(section, LoaderSection):
        message = "batch-size-find needs a section with batch_size, not a custom loader"
        raise ConfigError([Problem("data.train", message)])

    def fits(size: int) -> BatchSizeFit:
        result = try_batch_size(
            *(examined.config, run),
            size=size,
            memory_gib=options.memory_gib,
            debug=options.debug,
        )
        print(f"batch size {size}: {result.value}", flush=True)
        return result

    with raising_stops():
        size, reason = largest_batch_size(fits, section.batch_size, options.max_size)
    if not size:
        print("not even one sample fits")
        return 1
    why = {
        BatchSizeFit.TOO_FEW_SAMPLES: ", limited by the data set",
        BatchSizeFit.FITS: ", the largest one allowed",
    }
    print(f"largest batch size per process: {size}{why.get(reason, '')}")
    print(f"train with it: {train_with(options, f'data.train.batch_size={size}')}")
    return 0


def _read_training(examined: Examination, command: str) -> RunSections:
    if started_outside():
        message = "starts its processes itself; use --nproc instead of torchrun or srun"
        raise mistake(f"stepwrap {command} {message}")
    run = read_sections(examined)
    if run.train is None:
        message = f"{command} needs this section, but it is missing"
        raise ConfigError([Problem("train", message)])
    return run
