"""Record facts about a run that its log records do not have, for ``stepwrap report``."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import time
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...collectives import all_gather_object, get_rank, get_world_size
from ...primitives.files import replacing
from ...registry import HOOKS
from ...wrappers.layout import get_layout, local_part
from ...wrappers.sharding.mesh import check_axes
from ...wrappers.steps.preprocess import get_device
from ...wrappers.unwrap import num_data_ranks, plain_name, user_model
from ..hook import Hook
from ..skipping.rollback import Rollback
from ..state import LoopState

# The maximum number of warnings of each rank, and of characters in a text.
_MAX_WARNINGS, _MAX_LENGTH = 200, 2000
# The maximum number of groups in the report's picture of the parameters on each rank.
_MAX_GROUPS = 24
_PHASES_EVERY_S = 5.0


@HOOKS.register_module()
class RunInfoHook(Hook):
    """Write facts about the run into its folder, for ``stepwrap report``.

    Every rank must have this hook.

    ``environment.json`` has versions, devices, the wrapper, the mesh and the parameters that each
    rank holds. ``events.jsonl`` has the start and the end of the training, errors, and the warnings
    of all ranks with their step. ``phases.json`` has the seconds that rank 0 spent in each phase
    since the start. Host names, user names and paths are not recorded, unless a warning or an error
    contains them. Nothing is written if ``state.run_dir`` is None.
    """

    # After the hooks that add the last seconds to `state.phase_s` in `on_train_end`.
    order = 98

    def __init__(self) -> None:
        self._log = _EventLog()
        self._phases_due_s = 0.0

    def on_run_start(self, state: LoopState) -> None:
        if state.run_dir is not None:
            self._log.open(state)

    def on_train_start(self, state: LoopState) -> None:
        if state.run_dir is None:
            return
        self._log.open(state)
        ranks = all_gather_object(_facts_of_rank(state))
        if get_rank() == 0:
            state.run_dir.mkdir(parents=True, exist_ok=True)
            _write(state.run_dir / "environment.json", _environment(state, ranks))
            self._log.write("start")

    def on_log(self, state: LoopState, record: dict[str, float]) -> None:
        if time.monotonic() >= self._phases_due_s:
            self._write_phases(state)

    def on_train_end(self, state: LoopState) -> None:
        if state.run_dir is not None and get_rank() == 0:
            self._write_phases(state)
            self._log.write("end", text=state.stop_reason)
        self._log.close()

    def on_run_end(self, state: LoopState) -> None:
        self._log.close()

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        # The training continues after a rollback.
        if not isinstance(error, Rollback):
            self._log.write("error", text=f"{type(error).__name__}: {error}")
        self._log.close()

    def _write_phases(self, state: LoopState) -> None:
        self._phases_due_s = time.monotonic() + _PHASES_EVERY_S
        if state.run_dir is not None and state.run_dir.is_dir() and get_rank() == 0:
            seconds = {name: round(value, 6) for name, value in state.phase_s.items()}
            _write(state.run_dir / "phases.json", seconds)


class _EventLog(logging.Handler):
    """Append this rank's events to ``events.jsonl``; as a handler, it receives logged warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._state: LoopState | None = None
        self._seen: set[str] = set()
        self._show = warnings.showwarning

    def open(self, state: LoopState) -> None:
        """Start to record warnings; a second call has no effect."""
        if self._state is None:
            self._state = state
            self._show, warnings.showwarning = warnings.showwarning, self._record_warning
            logging.getLogger("stepwrap").addHandler(self)

    def close(self) -> None:
        """Stop recording warnings."""
        if self._state is not None:
            self._state = None
            logging.getLogger("stepwrap").removeHandler(self)
            if warnings.showwarning == self._record_warning:
                warnings.showwarning = self._show

    def write(self, event: str, *, text: str = "") -> None:
        """Append an event; several ranks may write at the same time."""
        state = self._state
        if state is None or state.run_dir is None or not state.run_dir.is_dir():
            return
        figures = {"event": event, "step": state.step, "rank": get_rank(), "time": time.time()}
        line = json.dumps({**figures, "text": text[:_MAX_LENGTH]}) + "\n"
        # A single write in append mode keeps the lines of several processes apart. A disk that is
        # full must not end the training here.
        try:
            with (state.run_dir / "events.jsonl").open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError:
            self.close()

    def emit(self, record: logging.LogRecord) -> None:
        handlers = {*logging.getLogger("stepwrap").handlers, *logging.root.handlers} - {self}
        if not handlers and logging.lastResort is not None:
            # Without another handler Python would have printed the warning.
            logging.lastResort.handle(record)
        self._write_once(record.getMessage())

    def _record_warning(self, message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        self._write_once(f"{category.__name__}: {message}")
        self._show(message, category, *args, **kwargs)

    def _write_once(self, text: str) -> None:
        if text not in self._seen and len(self._seen) < _MAX_WARNINGS:
            self._seen.add(text)
            self.write("warning", text=text)


def _facts_of_rank(state: LoopState) -> dict[str, Any]:
    device = get_device(state.model)
    local_sizes = {
        name: local_part(param).numel() for name, param in _parameters(state.model).items()
    }
    # torch.cpu and torch.mps have no names.
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {
        "host": socket.gethostname(),
        "device": str(device),
        "device_name": platform.machine() if get_name is None else get_name(device),
        "threads": torch.get_num_threads(),
        "held": _grouped(local_sizes),
    }


def _environment(state: LoopState, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    hosts = list(dict.fromkeys(rank_facts["host"] for rank_facts in ranks))
    # fully_shard replaces the class of the model by a subclass.
    model = next(
        c for c in type(user_model(state.model)).__mro__ if "torch.dist" not in c.__module__
    )
    parameters = _parameters(state.model)
    shapes = {name: get_layout(param).shape for name, param in parameters.items()}
    sizes = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    return {
        "stepwrap": metadata.version("stepwrap"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "system": platform.platform(terse=True),
        "cores": os.cpu_count(),
        "hosts": len(hosts),
        "model": model.__name__,
        "wrapper": type(state.model).__name__,
        "optimizer_wrapper": type(state.optim_wrapper).__name__,
        "mesh": _axes(state),
        "parameters": sum(sizes.values()),
        "trainable": sum(sizes[name] for name, param in parameters.items() if param.requires_grad),
        "groups": _grouped(sizes),
        "ranks": [{**rank_facts, "host": hosts.index(rank_facts["host"])} for rank_facts in ranks],
        "higher_is_better": state.higher_is_better,
        "max_steps": state.max_steps,
    }


def _axes(state: LoopState) -> dict[str, int]:
    """Return the size of each axis of the ranks' mesh, from the outermost to the innermost."""
    axes = state.settings.get("mesh")
    if axes:
        return check_axes(axes, get_world_size())
    data = num_data_ranks(state.model)
    remainder = get_world_size() // data
    return {"data": data, "tensor": remainder} if remainder > 1 else {"data": data}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    named = user_model(model).named_parameters()
    # A lazy parameter has no shape before the first batch.
    initialised = (
        (name, param) for name, param in named if not isinstance(param, nn.UninitializedParameter)
    )
    return {plain_name(name): param for name, param in initialised}


def _grouped(sizes: dict[str, int]) -> dict[str, int]:
    """Add up sizes by module, at the greatest depth with at most ``_MAX_GROUPS`` groups."""
    modules = {name: name.split(".")[:-1] or [name] for name in sizes}
    groups: Counter[str] = Counter()
    for depth in range(max(map(len, modules.values()), default=0), 0, -1):
        groups.clear()
        for name, size in sizes.items():
            groups[".".join(modules[name][:depth])] += size
        if len(groups) <= _MAX_GROUPS:
            break
    return dict(groups)


def _write(path: Path, content: Any) -> None:
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
