"""Hooks for the runs of ``verify-resume``: kill at a step, record samples, trace lines."""

from __future__ import annotations

import dis
import json
import os
import pickle
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from io import IOBase
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..collectives import all_gather_object, get_rank
from ..loops import Hook, LoopState, ShardedBatchSampler, save_checkpoint
from ..loops.rng import device_state, used_accelerator
from ..registry import is_users_file

# The start of the description of a process-wide generator; the name of its library follows.
GLOBAL = "the global generator of "
# The middle of the description of an iterator, whose position cannot be compared.
ITERATOR = ", an iterator ("
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_VALUES = (bool, int, float, complex, str, bytes, *_GENERATORS)
# Changes inside larger arrays are not detected.
_MAX_BYTES = 1 << 12

_is_users = cache(is_users_file)


class KillHook(Hook):
    """Save a checkpoint after an update, and kill all ranks by SIGKILL after a later one."""

    # Called after the ledger hook and after the checkpoint hook, whose state is also saved.
    order = 100

    def __init__(self, *, save_at: int, kill_at: int) -> None:
        self._save_at, self._kill_at = save_at, kill_at

    def on_update(self, state: LoopState) -> None:
        if state.step != self._kill_at:
            return
        processes = all_gather_object(os.getpid())
        if get_rank() == 0:
            # Rank 0 is killed last.
            for process in reversed(processes):
                os.kill(process, signal.SIGKILL)
        signal.pause()

    def on_save_point(self, state: LoopState) -> None:
        if state.step == self._save_at and state.batch and state.run_dir is not None:
            save_checkpoint(state.run_dir / "checkpoints", state)


class SamplesHook(Hook):
    """Write this rank's samples into ``<run_dir>/samples``.

    A line is a JSON list: update, epoch, batch, number within the batch, rank, index. Sorting the
    lines of all ranks gives the order of the run.
    """

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        sampler = getattr(state.dataloader, "batch_sampler", None)
        if not isinstance(sampler, ShardedBatchSampler) or not sampler.counts(state.batch):
            return
        assert state.run_dir is not None
        folder = state.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        with (folder / f"{get_rank()}_{os.getpid()}.jsonl").open("a") as file:
            for number, index in enumerate(sampler.get_indices(state.epoch, state.batch)):
                row = (state.step + 1, state.epoch, state.batch, number, sampler.rank, index)
                file.write(f"{json.dumps(row)}\n")


class TraceHook(Hook):
    """Record which lines of the user's files draw random numbers or change attributes.

    Before and after each line, also in data-loading workers, the hook compares the generators of
    Python, NumPy and torch, the attributes of ``self``, the global names of the module, and local
    generators. Iterators are recorded if a line that runs uses them. Each change is written once,
    as a JSON list of four entries:

    - "data" if it happened while a batch was read, otherwise "step";
    - whether it happened in a worker;
    - a description of the change;
    - file:line.

    Args:
        folder: the folder for the files, one of each process.
        rank: the rank to trace.
    """

    order = 100

    def __init__(self, *, folder: str, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank
        self._stage = "data"
        self._process = os.getpid()
        self._has_seeded_workers = False
        self._marks: dict[str, dict[str, Any]] = {}
        self._written: set[str] = set()

    def on_train_start(self, state: LoopState) -> None:
        sampler = getattr(state.dataloader, "batch_sampler", None)
        self._has_seeded_workers = isinstance(sampler, ShardedBatchSampler)
        if get_rank() == self._rank:
            sys.settrace(self._enter)
            loader: Any = state.dataloader
            if hasattr(loader, "worker_init_fn"):
                loader.worker_init_fn = partial(self._start_worker, loader.worker_init_fn)

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self._stage = "step"

    def on_save_point(self, state: LoopState) -> None:
        self._stage = "data"

    def on_train_end(self, state: LoopState) -> None:
        sys.settrace(None)

    def _start_worker(self, start: Callable[[int], None] | None, worker: int) -> None:
        sys.settrace(self._enter)
        if start is not None:
            start(worker)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Begin to trace the lines of a call of the user's functions."""
        code, caller = frame.f_code, frame.f_back
        if not _is_users(code.co_filename) or code.co_name == "<module>":
            return None
        if caller is not None and _is_users(caller.f_code.co_filename):
            self._compare(caller, caller.f_lineno)
        self._compare(frame, None)
        line = frame.f_lineno

        def follow(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
            nonlocal line
            self._compare(frame, line)
            for used in _iterators_used(frame, line):
                self._write(used, f"{code.co_filename}:{line}")
            line = frame.f_lineno
            return follow

        return follow

    def _compare(self, frame: FrameType, line: int | None) -> None:
        """Record the changes that ``line`` made; if it is None, only store the current values."""
        for where, values in _namespaces(frame):
            marks = {name: _mark(value) for name, value in values.items()}
            before, self._marks[where] = self._marks.get(where, marks), marks
            for name in values if line is not None and marks != before else ():
                if marks[name] != before.get(name):
                    site = f"{frame.f_code.co_filename}:{line}"
                    self._write(_described(name, values[name], where), site)

    def _write(self, change: str, site: str) -> None:
        in_worker = os.getpid() != self._process
        text = json.dumps((self._stage, in_worker, change, site))
        seeded = in_worker and self._has_seeded_workers and change.startswith(GLOBAL)
        if text not in self._written and not seeded:
            self._written.add(text)
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(f"{text}\n")


def _namespaces(frame: FrameType) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the owners whose values a frame can change, each with its values by name."""
    streams: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    # As arrays, since pickles of equal tensors may differ.
    streams["torch"] = torch.get_rng_state().numpy()
    if (device := used_accelerator()) is not None:
        streams[device.type] = device_state(device).numpy()
    yield "", {name: pickle.dumps(state) for name, state in streams.items()}
    # Python changes some of the names with underscores, such as its registry of warnings.
    module_values = {name: value for name, value in frame.f_globals.items() if name[:2] != "__"}
    yield frame.f_globals["__name__"], module_values
    local = frame.f_locals
    generators = {name: value for name, value in local.items() if type(value) in _GENERATORS}
    yield f"{frame.f_code.co_name}()", generators
    owner = local.get("self")
    yield f"{type(owner).__name__} {id(owner)}", getattr(owner, "__dict__", {})


def _iterators_used(frame: FrameType, line: int) -> Iterator[str]:
    """Yield the iterators of the module and of ``self`` that a line uses.

    The position of an iterator cannot be compared without advancing it.
    """
    owner = frame.f_locals.get("self")
    namespaces = {
        "LOAD_GLOBAL": (frame.f_globals, frame.f_globals["__name__"]),
        "LOAD_ATTR": (getattr(owner, "__dict__", {}), type(owner).__name__),
    }
    for name, operation in _names_read(frame.f_code).get(line, ()):
        values, where = namespaces[operation]
        value = values.get(name)
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            kind = type(value)
            yield f"{name} of {where}{ITERATOR}{kind.__module__}.{kind.__qualname__})"


@cache
def _names_read(code: CodeType) -> dict[int, list[tuple[str, str]]]:
    """Return by line the name and operation of each global or attribute that ``code`` reads."""
    line, names = code.co_firstlineno, defaultdict[int, list[tuple[str, str]]](list)
    starts = dict(dis.findlinestarts(code))
    for step in dis.get_instructions(code):
        line = starts.get(step.offset) or line
        if step.opname in ("LOAD_GLOBAL", "LOAD_ATTR"):
            names[line].append((str(step.argval), step.opname))
    return names


def _mark(value: Any) -> Any:
    """Return an object that compares equal as long as a value does not change."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES
    if type(value) in _VALUES or is_small:
        return pickle.dumps(value)
    if isinstance(value, Tensor):
        return id(value), value._version
    return id(value), len(value) if isinstance(value, list | dict | set) else 0


def _described(name: str, value: Any, where: str) -> str:
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    detail = f", a {library} {kind.__name__}" if kind in _GENERATORS else ""
    return f"{name} of {where.partition(' ')[0]}{detail}" if where else f"{GLOBAL}{name}"
