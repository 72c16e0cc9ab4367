"""The command ``replay``: run one step again, from the nearest checkpoint, and examine a rank."""

from __future__ import annotations

import os
import pdb
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import all_gather_object, broadcast, get_rank, get_world_size
from ..loops import (
    EpochTrainLoop,
    Hook,
    LoopState,
    SpikeGuardHook,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from ..loops.hooks.profile import create_profiler, operations_table
from ..primitives.tensor_bits import same_bits, widened
from ..registry import Config, Examination, RunSections
from ..runner.command.command import Options, mistake
from ..runner.failure import as_mistakes_in
from ..runner.jobs import on_ranks, prepared
from ..runner.parts import build_parts
from ..runner.rank_processes import raising_stops
from ..runner.runner import Runner
from ..runner.sections import read_sections
from ..wrappers.layout import local_part, reshard

_MOST_ROWS = 15
# The time that ranks wait for a rank in the debugger: a week.
_DEBUGGING_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Watch:
    """The step to examine, and the tools; ``rank`` None means the default of each tool."""

    step: int
    rank: int | None = None
    debugger: bool = False
    anomaly: bool = False
    # Where to write the profiler's trace; "" for no profile.
    profile: str = ""

    def here(self, default: int | None = 0) -> bool:
        """Return whether this rank is examined; ``default=None`` means every rank."""
        rank = default if self.rank is None else self.rank
        return rank is None or rank == get_rank()


@dataclass
class Replayed:
    """The result of the step on one rank."""

    # The checkpoint from which the replay started; "" for the beginning of the run.
    checkpoint: str = ""
    started_at: int = 0
    # The logged values of each of its batches.
    logs: list[dict[str, float]] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    skipped: bool = False
    profile: str = ""
    # The run's checkpoint of this step ("" for none), and whether the replayed weights equal it.
    saved: str = ""
    equal: bool = False


def _wide(value: Any) -> Tensor:
    """Return a logged value with all its bits; Python numbers would become float32."""
    dtype = None if hasattr(value, "dtype") else torch.float64
    return widened(torch.as_tensor(value, dtype=dtype))


def run_replay(examined: Examination, options: Options) -> int:
    """Run one step again, on as many ranks as it had, and print the result."""
    folder, trace = Path(options.words[0]), options.profile or ""
    if trace and not Path(trace).absolute().parent.is_dir():
        raise mistake(f"stepwrap replay: --profile {trace}: its folder does not exist")
    saved = list_checkpoints(folder / "checkpoints")
    config = examined.config
    # The first checkpoint after the step has its number of ranks, since a resume begins at one.
    later = (meta for _, meta in saved if meta["step"] >= options.step)
    later_meta = min(later, key=itemgetter("step"), default=saved[0][1] if saved else {})
    nproc = later_meta.get("world_size") or int(config.select("launch.nproc") or 1)
    run = read_sections(examined, nproc)
    # A rank under a debugger keeps the others waiting.
    wait_s = _DEBUGGING_S if options.debugger else run.launch.timeout_s
    run = replace(run, launch=replace(run.launch, nproc=nproc, timeout_s=wait_s))
    switches = {name: getattr(options, name) for name in ("rank", "debugger", "anomaly")}
    watch = Watch(options.step, profile=trace, **switches)
    with raising_stops():
        replayed = on_ranks(run, replay, config, run, watch=watch, debug=options.debug)
    if 0 in replayed:
        _report_step(watch, replayed)
    return 0


def _report_step(watch: Watch, replayed: Mapping[int, Replayed]) -> None:
    lead = replayed[0]
    source = lead.checkpoint or "the beginning of the run"
    print(f"step {watch.step}, from {source} ({watch.step - lead.started_at - 1} steps run first)")
    for rank, rank_result in sorted(replayed.items()):
        for number, logs in enumerate(rank_result.logs, 1):
            batch = f", batch {number}" if len(rank_result.logs) > 1 else ""
            values = ", ".join(f"{name} {value!r}" for name, value in logs.items())
            print(f"rank {rank}{batch}: {values}")
    for name, rates in lead.rates.items():
        print(f"{name}: {', '.join(map(repr, rates))}")
    if lead.skipped:
        print("the spike guard skipped it")
    if lead.saved:
        result = "equal, bit for bit," if lead.equal else "do NOT equal"
        print(f"the weights after it {result} {lead.saved}")
    for table in (rank_result.profile for rank_result in replayed.values() if rank_result.profile):
        print(f"{table}\ntrace: {watch.profile}")


def replay(config: Config, run: RunSections, *, watch: Watch, debug: bool) -> Replayed:
    """Train a run up to and including the step, without writing files; every rank must call this.

    Raises:
        ValueError: the run does not have that rank, or ends before the step.
    """
    with prepared(config, run, debug=debug):
        if watch.rank is not None and watch.rank >= get_world_size():
            ranks = f"must be below {get_world_size()}, the number of ranks"
            raise ValueError(f"--rank {watch.rank}: {ranks}")
        folder = Path(run.run_dir)
        path = find_checkpoint(folder, before=watch.step)
        latest = find_checkpoint(folder)
        with as_mistakes_in(config):
            run = run if path is None else run.without_loaded()
            parts = build_parts(run, ("train", "val"))
        hook = ReplayHook(watch)
        hooks = {**parts.hooks, "replay": hook}
        runner = Runner.from_parts(replace(parts, hooks=hooks, run_dir=None))
        if latest is not None:
            _recall(runner.state, latest)
        state = runner.train(resume=path or False)
        if not hook.done:
            end = f"the run ends after step {state.step}"
            raise ValueError(f"--step {watch.step}: {end}")
        replayed = hook.seen
        replayed.checkpoint = str(path or "")
        _compare(replayed, state, folder)
        return replayed


def _recall(state: LoopState, latest: Path) -> None:
    """Load the spike guards from the last checkpoint: it lists all steps that the run skipped."""
    guards = {n: guard for n, guard in state.stateful.items() if isinstance(guard, SpikeGuardHook)}
    saved = load_checkpoint(latest).read("state")["stateful"] if guards else {}
    for name in guards.keys() & saved.keys():
        guards[name].load_state_dict(saved[name])


def _compare(replayed: Replayed, state: LoopState, folder: Path) -> None:
    """Compare the weights with the run's checkpoint of this step, if there is one."""
    listed = list_checkpoints(folder / "checkpoints") if get_rank() == 0 else []
    saved = broadcast(next((str(p) for p, meta in listed if meta["step"] == state.step), ""))
    if not saved:
        return
    ours = [tensor.clone() for tensor in _local_parts(state.model)]
    load_checkpoint(saved).load_model(state.model)
    equal = all(map(same_bits, ours, _local_parts(state.model)))
    replayed.saved, replayed.equal = saved, all(all_gather_object(equal))


def _local_parts(model: nn.Module) -> list[Tensor]:
    """Return this rank's parts of all weights and buffers."""
    reshard(model)
    return [local_part(tensor).detach() for tensor in (*model.parameters(), *model.buffers())]


class ReplayHook(Hook):
    """Examine one step of a training and stop after it."""

    # Called after all other hooks, so that the debugger stops right before the training step.
    order = 99

    def __init__(self, watch: Watch) -> None:
        self.seen = Replayed()
        self.done = False
        self._watch = watch
        self._open = ExitStack()
        self._debugger: _Debugger | None = None

    def on_train_start(self, state: LoopState) -> None:
        self.seen.started_at = state.step
        if state.skip_steps is not None:
            # The examined step is run even if the config skips it.
            state.skip_steps.discard(self._watch.step)

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        if state.step + 1 != self._watch.step:
            return
        if not self.seen.logs:
            self._start()
        if self._debugger is not None:
            frame = sys._getframe(1)
            # Other hooks may have wrapped this listener.
            while frame.f_globals["__name__"] != EpochTrainLoop.__module__ and frame.f_back:
                frame = frame.f_back
            self._debugger.begin(frame)

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Any]) -> None:
        if state.step + 1 == self._watch.step:
            means = {name: _wide(v).mean() for name, v in logs.items()}
            self.seen.logs.append({name: mean.item() for name, mean in means.items()})
            # Read now, since the schedulers change the rates after the update.
            self.seen.rates = state.optim_wrapper.get_lr()

    def on_update(self, state: LoopState) -> None:
        if state.step == self._watch.step:
            self._open.close()
            self.done, self.seen.skipped = True, state.skipped
            state.request_stop("the step was replayed")

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        if self._debugger is not None and isinstance(error, Exception) and not self.done:
            self._debugger.message(f"{type(error).__name__}: {error}")
            self._debugger.reset()
            self._debugger.interaction(None, error.__traceback__)
        self._open.close()

    def _start(self) -> None:
        watch, tools = self._watch, self._open
        if watch.anomaly and watch.here(default=None):
            # Torch names the forward call in a warning, which by default only rank 0 shows.
            tools.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            tools.enter_context(torch.autograd.set_detect_anomaly(True))
        if watch.profile and watch.here():
            tools.enter_context(self._profiling())
        if watch.debugger and watch.here():
            tools.enter_context(_terminal())
            self._debugger = _Debugger.at_terminal()

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        with create_profiler(record_shapes=True) as profiler:
            yield
        profiler.export_chrome_trace(self._watch.profile)
        self.seen.profile = operations_table(profiler.key_averages(), _MOST_ROWS)


class _Debugger(pdb.Pdb):
    """Python's debugger; the step continues when the user quits or the input ends."""

    do_q = do_quit = do_exit = do_EOF = pdb.Pdb.do_continue  # noqa: N815 - names of its commands

    def begin(self, frame: FrameType) -> None:
        """Stop at the line after the current line of ``frame``."""
        self.reset()
        self.set_until(frame)
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = self.trace_dispatch
            self.botframe, above = above, above.f_back
        sys.settrace(self.trace_dispatch)

    @classmethod
    def at_terminal(cls) -> _Debugger:
        # In processes started for ranks sys.stdin is empty, but file descriptor 0 is usable.
        terminal = None if get_world_size() == 1 else open(0, closefd=False)  # noqa: SIM115
        return cls(stdin=terminal, nosigint=True)


@contextmanager
def _terminal() -> Iterator[None]:
    """Let this process read from the terminal, which belongs to the launcher's group."""
    if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
        yield
        return
    before, handler = os.tcgetpgrp(0), signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(0, before)
        signal.signal(signal.SIGTTOU, handler)
