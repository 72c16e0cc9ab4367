"""The command ``verify-resume``: compare a killed and resumed run with an uninterrupted one."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..loops import Checkpoint, find_checkpoint, load_checkpoint
from ..primitives.tensor_bits import same_bits
from ..registry import Examination, RunSections, optim_wrapper_sections
from ..runner.command.cli import main
from ..runner.command.command import Options, mistake
from ..runner.launcher import started_outside
from ..runner.rank_processes import add_parent_watch, raising_stops
from ..runner.sections import read_sections
from . import verify_hooks
from .ledger import Difference, first_difference, read_ledger
from .verify_hooks import GLOBAL, ITERATOR

_NAME = "stepwrap verify-resume"
DIFFERENT = 1
# The number of updates between the checkpoint and the kill, which the kill loses.
_LOST = 2
_HOOKS = verify_hooks.__name__
_LEDGER = "hooks.ledger={every_steps: 1, full: true, max_mib: 4096}"
# Fields of a log record that depend on the time.
_TIMES = (
    *("time", "samples_per_s", "steps_per_s", "tokens_per_s", "mfu", "data_share"),
    *("hooks_share", "slowest_rank", "rank_wait_share"),
)
_MAX_CAUSES = 4
# The allowed difference of weights after a resume on another number of ranks.
_TOLERANCES, _TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}, 1e-2


def run_verify_resume(examined: Examination, options: Options) -> int:
    """Print whether a killed and resumed run equals an uninterrupted one; 0 if it does."""
    if started_outside():
        raise mistake(f"{_NAME}: must be run without torchrun or srun; it starts its ranks itself")
    if options.kill_at == 1:
        raise mistake(
            f"{_NAME}: --kill-at must be at least 2, because a checkpoint is saved at an earlier "
            "step, got 1"
        )
    run = read_sections(examined)
    if options.then:
        read_sections(examined, options.then)
    with raising_stops():
        if options.run_dir is not None:
            return _verify(_Runs(options, Path(options.run_dir)), options, run)
        # Ranks may still be ending after a signal.
        with TemporaryDirectory(prefix="stepwrap_verify_", ignore_cleanup_errors=True) as folder:
            return _verify(_Runs(options, Path(folder)), options, run)


class _Runs:
    """The runs of a config, each trained in a separate process and folder."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.folder = folder
        self._words = [*options.words, "ledger=false", _LEDGER, "hooks.progress=false"]
        self._words += [f"hooks.samples={{type: {_HOOKS}.SamplesHook}}"] if options.then else []
        self._words += [f"device={options.device}"] if options.device else []
        self._words += ["launch.max_restarts=0"]
        self._words += ["launch.oversubscribe=true"] if options.oversubscribe else []
        self._nproc = options.nproc

    def train(self, name: str, *words: str, nproc: int | None = None, until: int = 0) -> Path:
        """Run ``stepwrap train`` with further arguments; return the run's folder.

        Raises:
            RuntimeError: the run has failed, or was not killed after step ``until``. The message
                contains its output.
        """
        run_dir, output = self.folder / name, self.folder / f"{name}.txt"
        self.folder.mkdir(parents=True, exist_ok=True)
        ranks = nproc or self._nproc
        nproc_words = [f"--nproc={ranks}"] if ranks else []
        command = ["train", *self._words, *words, *nproc_words, f"--run-dir={run_dir}"]
        args = (multiprocessing.get_start_method(), command, output)
        process = multiprocessing.get_context("spawn").Process(target=_train, args=args)
        with add_parent_watch():
            process.start()
        try:
            process.join()
        finally:
            process.kill()
            process.join()
        as_wanted = process.exitcode == 0
        if until:
            as_wanted = (run_dir / "ledger").exists() and read_ledger(run_dir).steps[-1:] == [until]
        if not as_wanted:
            raise RuntimeError(f"the {name} run has failed:\n{output.read_text()}")
        return run_dir


def _train(start_method: str, command: list[str], output: Path) -> None:
    # For data-loading workers, which would otherwise be spawned like this process.
    multiprocessing.set_start_method(start_method, force=True)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(command))


def _verify(runs: _Runs, options: Options, run: RunSections) -> int:
    uninterrupted = runs.train("uninterrupted")
    end = _last_checkpoint(uninterrupted).meta
    print(f"uninterrupted run: {end['step']} steps", flush=True)
    kill_at = options.kill_at or _middle(end)
    if not 1 < kill_at <= end["step"]:
        bound = f"must be 2 to {end['step']}, the run's steps"
        raise mistake(f"{_NAME}: --kill-at {bound}, got {kill_at}")
    arguments = f"save_at: {max(1, kill_at - _LOST)}, kill_at: {kill_at}"
    kill = f"hooks.kill={{type: {_HOOKS}.KillHook, {arguments}}}"
    killed = runs.train("killed", kill, until=kill_at)
    start = _last_checkpoint(killed)
    if difference := first_difference(read_ledger(uninterrupted), read_ledger(killed)):
        print(f"{_format_text(difference)} before the kill: the run is not repeatable", flush=True)
        _print_causes(runs, difference)
        return DIFFERENT
    shutil.copytree(killed, runs.folder / "resumed", ignore=shutil.ignore_patterns("samples"))
    resumed = runs.train("resumed", "--resume", nproc=options.then)
    ranks = f" on {options.then} ranks" if options.then else ""
    step = start.meta["step"]
    print(f"killed at step {kill_at}, resumed{ranks} from the checkpoint of step {step}")
    if options.then:
        return _compare_elastic(uninterrupted, resumed, step, run)
    difference = first_difference(read_ledger(uninterrupted), read_ledger(resumed), after=step - 1)
    difference = (
        difference
        or _log_difference(uninterrupted, resumed)
        or _state_difference(uninterrupted, resumed)
    )
    if difference is None:
        same = "sample ids, random states, losses, gradients, weights, optimizer state, logs"
        print(f"the same in both runs: {same}")
        return 0
    print(_format_text(difference), flush=True)
    _print_causes(runs, difference, start.path)
    return DIFFERENT


def _last_checkpoint(run: Path) -> Checkpoint:
    path = find_checkpoint(run)
    if path is None:
        raise mistake(f"{_NAME}: the run saves no checkpoint to resume from (hooks.checkpoint)")
    return load_checkpoint(path)


def _middle(end: Mapping[str, Any]) -> int:
    """Return a step in the middle of an epoch in the middle of the run, 3 or later if possible."""
    passes = max(1, end["epoch"] + (end["batch"] > 0))
    steps = end["step"] / passes
    return int(min(end["step"], passes // 2 * steps + max(_LOST + 1, steps / 2)))


def _format_text(difference: Difference) -> str:
    if difference.stage == "random state":
        rank = f"step {difference.step}, rank {difference.rank}"
        return f"{rank}: the {difference.name} random state differs"
    return f"{difference} differs"


def _log_difference(uninterrupted: Path, resumed: Path) -> Difference | None:
    """Compare the log records, except for speeds and times."""
    files = [run / "metrics.jsonl" for run in (uninterrupted, resumed)]
    texts = [file.read_text().splitlines() if file.exists() else [] for file in files]
    for lines in zip_longest(*texts, fillvalue="{}"):
        a, b = map(json.loads, lines)
        both = {**a, **b}
        for name in both:
            if name not in _TIMES and a.get(name) != b.get(name):
                return Difference(both["step"], 0, f"{both['phase']} record", name, -1)
    return None


def _state_difference(uninterrupted: Path, resumed: Path) -> Difference | None:
    """Compare the last checkpoints, except for the clock."""
    a, b = _last_checkpoint(uninterrupted), _last_checkpoint(resumed)
    for file in a.stems:
        for path in _unequal(a.read(file), b.read(file)):
            if path != "counters.clock_s":
                rank = int(file[5:10]) if file.startswith("rank") else 0
                return Difference(a.meta["step"], rank, file, path, -1)
    return None


def _unequal(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of values that are not equal, bit for bit, in two trees."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _unequal(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if not same_bits(a, b):
            yield path
    # Strings, so that NaN equals itself.
    elif repr(a) != repr(b):
        yield path


def _print_causes(runs: _Runs, found: Difference, start: Path | None = None) -> None:
    """Train up to a difference again, and print the user's lines that may be the cause."""
    lines = runs.folder / "lines"
    lines.mkdir()
    trace = f"type: {_HOOKS}.TraceHook, folder: {json.dumps(str(lines))}, rank: {found.rank}"
    words = [f"hooks.trace={{{trace}}}", f"hooks.ledger.until={max(1, found.step)}"]
    try:
        runs.train("traced", *words, "data.test=null", *([f"--resume={start}"] if start else []))
    except RuntimeError:
        print("  the steps up to there could not be run again to search for the cause")
        return
    # Changes come before iterators, which may have advanced.
    causes = sorted(dict.fromkeys(_causes(lines, found)), key=lambda cause: ITERATOR in cause[1])
    for site, cause in causes[:_MAX_CAUSES]:
        print(f"  {site.removeprefix(f'{Path.cwd()}/')} {cause}")
    if not causes:
        print("  no line of your files draws random numbers or changes an attribute")


def _causes(lines: Path, difference: Difference) -> Iterator[tuple[str, str]]:
    """Yield place and description of possible causes of a difference."""
    for text in (t for file in sorted(lines.iterdir()) for t in file.read_text().splitlines()):
        stage, in_worker, what, place = json.loads(text)
        where = " in a worker process" if in_worker else ""
        if difference.stage == "random state":
            if what == f"{GLOBAL}{difference.name}" and not in_worker:
                yield place, f"draws from {what}"
        elif (stage == "data") == (difference.stage == "data"):
            if ITERATOR in what:
                yield place, f"may advance {what}{where}: is its position in a state_dict()?"
            elif not what.startswith(GLOBAL):
                yield place, f"changes {what}{where}: is it in a state_dict()?"
            elif in_worker:
                yield place, f"draws from {what}{where} without a worker seed"


def _compare_elastic(uninterrupted: Path, resumed: Path, start: int, run: RunSections) -> int:
    """Compare a run with its resume on another number of ranks: samples, and weights."""
    sections = optim_wrapper_sections(run.optim_wrapper, run.optimizer).values()
    is_weighted = any(section.get("loss_weight") is not None for section in sections)
    before = [row for row in _samples(uninterrupted) if row[0] <= start]
    orders = [
        _order(rows, is_weighted) for rows in (_samples(uninterrupted), before + _samples(resumed))
    ]
    for (a, index), (b, other) in zip_longest(*orders, fillvalue=(0, None)):
        if (a, index) != (b, other):
            print(f"step {a or b}: sample {other} instead of {index}")
            return DIFFERENT
    same = "the same in both runs: the samples of each update and their order"
    print(same if orders[0] else "data.train is a custom loader: samples are not compared")
    weights, other_weights = (
        _last_checkpoint(run_dir).read("model") for run_dir in (uninterrupted, resumed)
    )
    floats = {
        name: weight
        for name, weight in weights.items()
        if (weight.is_floating_point() or weight.is_complex()) and weight.numel()
    }
    allowed = {
        name: _TOLERANCES.get(weight.dtype.to_real(), _TOLERANCE) for name, weight in floats.items()
    }
    if not floats:
        print("the model has no floating-point weights to compare")
        return 0
    far = {
        name: _distance(*(w.to(_exact(w)) for w in (weight, other_weights[name])))
        for name, weight in floats.items()
    }
    name = max(far, key=lambda name: far[name] / allowed[name])
    kind = str(floats[name].dtype).removeprefix("torch.")
    largest = f"{far[name]:.1e}, in {name} ({allowed[name]:.0e} is allowed in {kind})"
    print(f"the weights differ by at most {largest}")
    if far[name] <= allowed[name]:
        return 0
    if math.isinf(far[name]):
        return DIFFERENT
    if drawn := _drawn(uninterrupted):
        print(f"  random numbers are drawn ({drawn}), and each rank has different streams")
    elif not is_weighted:
        print("  without loss_weight an update is a mean of the ranks' means")
    else:
        print("  check whether a layer or the loss mixes samples (docs/exactness.md)")
    return 0 if drawn or not is_weighted else DIFFERENT


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors' values; infinite if only one value is NaN."""
    apart = (a - b).abs().nan_to_num(math.inf, math.inf)
    return apart.masked_fill(a.isclose(b, rtol=0, atol=0, equal_nan=True), 0.0).max().item()


def _samples(run: Path) -> list[list[int]]:
    """Return the rows of ``SamplesHook``, in the order of the whole run."""
    files = (run / "samples").glob("*.jsonl")
    # Ranks that share their samples have written equal rows.
    return sorted(
        map(
            list,
            {tuple(json.loads(row)) for file in files for row in file.read_text().splitlines()},
        )
    )


def _order(rows: list[list[int]], is_weighted: bool) -> list[tuple[int, int | None]]:
    """Return (update, sample) pairs; without a ``loss_weight``, drop repetitions in an epoch."""
    if is_weighted:
        return [(row[0], row[-1]) for row in rows]
    earliest = {(row[1], row[-1]): row for row in reversed(rows)}
    return [(row[0], row[-1]) for row in sorted(earliest.values())]


def _drawn(run: Path) -> str:
    """Name the random streams of the training process from which a run has drawn."""
    ledger = read_ledger(run)
    start, end = ledger.entry(ledger.steps[1]), ledger.entry(ledger.steps[-1])
    streams = [draw for draw in start if draw.stage == "random state"]
    return ", ".join(draw.name for draw in streams if start[draw] != end[draw])
