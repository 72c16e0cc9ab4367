"""Profile some training steps, and add memory and system statistics to the log records."""

from __future__ import annotations

import logging
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from ...collectives import get_rank
from ...registry import HOOKS
from ..hook import Hook, Scalars
from ..rng import used_accelerator
from ..state import LoopState

logger = logging.getLogger(__name__)

_NAME_WIDTH = 46
_GIB = 2.0**30


@HOOKS.register_module()
class ProfileHook(Hook):
    """Profile some updates with ``torch.profiler``.

    Each rank writes a trace, ``<run_dir>/profile/rank<rank>.json``, which Perfetto and
    chrome://tracing show. Rank 0 logs the costliest operations and the share of the time that it
    waited for data, and writes them into ``<run_dir>/profile/costliest.txt``. Nothing is written if
    ``state.run_dir`` is None. The profiled steps are slower than others.

    Args:
        skip: updates before the first profiled one, at least 0; the first updates of a run are not
            typical, because libraries warm up.
        steps: number of profiled updates, at least 1.

    Raises:
        ValueError: a number is too small.
    """

    # After most other hooks, so that their time does not count as waiting for data.
    order = 96

    def __init__(self, *, skip: int = 10, steps: int = 10) -> None:
        if skip < 0 or steps < 1:
            raise ValueError(
                f"ProfileHook needs skip >= 0 and steps >= 1, got skip={skip} and steps={steps}"
            )
        self._skip, self._steps = skip, steps
        self._profiler: profile | None = None
        self._is_done = False
        self._after = 0
        self._mark_s = self._started_s = self._waited_s = 0.0

    def on_train_start(self, state: LoopState) -> None:
        self._after = state.step + self._skip
        self._is_done = state.run_dir is None
        self._start_if_due(state)

    def on_epoch_start(self, state: LoopState) -> None:
        self._mark_s = perf_counter()

    def on_batch_start(self, state: LoopState, batch: Any) -> None:
        self._waited_s += perf_counter() - self._mark_s

    def on_batch_end(self, state: LoopState, batch: Any, logs: Mapping[str, Tensor]) -> None:
        self._mark_s = perf_counter()

    def on_update(self, state: LoopState) -> None:
        if self._profiler is None:
            self._start_if_due(state)
        elif state.step >= self._after + self._steps:
            self._finish(state)
        self._mark_s = perf_counter()

    def on_save_point(self, state: LoopState) -> None:
        self._mark_s = perf_counter()

    def on_train_end(self, state: LoopState) -> None:
        if self._profiler is not None and state.step > self._after:
            self._finish(state)
        elif not self._is_done:
            self._stop()
            logger.warning(
                "nothing was profiled: training ended at step %d, and profiling starts after step "
                "%d; decrease hooks.profile.skip",
                state.step,
                self._after,
            )

    def on_exception(self, state: LoopState, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start_if_due(self, state: LoopState) -> None:
        if self._is_done or state.step < self._after:
            return
        self._profiler = create_profiler()
        self._profiler.start()
        self._waited_s = 0.0
        self._started_s = self._mark_s = perf_counter()

    def _finish(self, state: LoopState) -> None:
        profiler, self._profiler, self._is_done = self._profiler, None, True
        assert profiler is not None
        assert state.run_dir is not None
        elapsed_s = perf_counter() - self._started_s
        profiler.stop()
        folder = state.run_dir / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"rank{get_rank()}.json"
        profiler.export_chrome_trace(str(trace))
        if get_rank() != 0:
            return
        text = (
            f"profile of steps {self._after + 1} to {state.step}: {elapsed_s:.2f} s, "
            f"{min(1.0, self._waited_s / elapsed_s):.0%} waiting for data\n"
            f"{operations_table(profiler.key_averages())}\n"
            f"trace for https://ui.perfetto.dev: {trace}"
        )
        (folder / "costliest.txt").write_text(f"{text}\n", encoding="utf-8")
        logger.info("%s", text)


def create_profiler(*, record_shapes: bool = False) -> profile:
    """Return a profiler of the CPU and of the accelerators that torch can profile."""
    return profile(record_shapes=record_shapes)


def operations_table(events: Sequence[Any], rows: int = 10) -> str:
    """Return the costliest operations of a profile as lines of at most 80 columns.

    Args:
        rows: the maximum number of operations.
        events: the ``key_averages()`` of a profiler. The times are GPU times if there are any,
            otherwise CPU times. They exclude the operations that an operation calls.
    """
    on_device = any(event.self_device_time_total > 0 for event in events)
    kind = "self_device_time_total" if on_device else "self_cpu_time_total"
    times_us = {event.key: getattr(event, kind) for event in events}
    calls = {event.key: event.count for event in events}
    total_us = sum(times_us.values()) or math.inf
    unit = "GPU ms" if on_device else "CPU ms"
    lines = [f"{'operation':<{_NAME_WIDTH}} {'calls':>8} {unit:>12} {'share':>7}"]
    for key in sorted(times_us, key=lambda operation: -times_us[operation])[:rows]:
        name = key if len(key) <= _NAME_WIDTH else f"{key[: _NAME_WIDTH - 3]}..."
        share = times_us[key] / total_us
        milliseconds = times_us[key] / 1000
        lines.append(f"{name:<{_NAME_WIDTH}} {calls[key]:>8} {milliseconds:>12.2f} {share:>7.1%}")
    return "\n".join(lines)


@HOOKS.register_module()
class SystemHook(Hook):
    """Add memory and system statistics to the log records, as means over the ranks.

    ``rss_gib`` is the memory of the process, ``cuda_peak_gib`` the highest allocation on its GPU
    since the last record (``xpu_peak_gib`` on an XPU; torch has none for MPS), ``cpu_cores`` the
    average number of CPU cores that the process used, and ``disk_free_gib`` the free space of the
    run folder's disk. The worker processes of a loader are not included.
    """

    def __init__(self) -> None:
        self._since_s = perf_counter()
        self._cpu_s = time.process_time()

    def on_train_start(self, state: LoopState) -> None:
        self._since_s, self._cpu_s = perf_counter(), time.process_time()

    def collect_logs(self, state: LoopState, scalars: Scalars) -> None:
        now_s, cpu_s = perf_counter(), time.process_time()
        scalars["rss_gib"] = resident_bytes() / _GIB
        if (device := device_with_peak()) is not None:
            module: Any = torch.get_device_module(device)
            scalars[f"{device.type}_peak_gib"] = module.max_memory_allocated() / _GIB
            module.reset_peak_memory_stats()
        scalars["cpu_cores"] = (cpu_s - self._cpu_s) / max(now_s - self._since_s, 1e-9)
        if state.run_dir is not None:
            with suppress(OSError):
                scalars["disk_free_gib"] = shutil.disk_usage(state.run_dir).free / _GIB
        self._since_s, self._cpu_s = now_s, cpu_s


def device_with_peak() -> torch.device | None:
    """Return the accelerator that this process uses if torch knows its highest allocation."""
    device = used_accelerator()
    knows = device is not None and hasattr(torch.get_device_module(device), "max_memory_allocated")
    return device if knows else None


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; on systems without /proc, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        # Bytes on macOS, KiB elsewhere.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * os.sysconf("SC_PAGE_SIZE")
