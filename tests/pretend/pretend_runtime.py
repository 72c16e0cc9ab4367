"""The runtime of pretend devices: waits, late copies, random streams, graphs and functions such as
`torch.cuda.synchronize`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pretend_library
import torch
from pretend_kinds import KIND
from pretend_library import library
from pretend_tensors import below_autograd, install_storages
from torch import Tensor
from torch.utils._pytree import tree_leaves

# torch's module of the devices, such as `torch.cuda`.
_module: Any = getattr(torch, KIND.type)
_GIB = 2**30
_TOTAL_MEMORY = 16 * _GIB
# Objects of `pretend_devices.Work`.
recorders: list[Any] = []


def current_device() -> int:
    return int(library.pretend_get_device())


def _exchange_device(index: int) -> int:
    return int(library.pretend_set_device(index))


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    device = torch.device(device)
    return current_device() if device.index is None else device.index


# Waits --------------------------------------------------------------------------------------------

_sync_mode = 0


WITHOUT_FLOAT64 = not KIND.has_float64 or os.environ.get("PRETEND_WITHOUT_FLOAT64") == "1"

# What `torch.cuda._sleep` made the device do last, until the host waits for it.
_long_work: object | None = None


def note_launch(name: str) -> None:
    """Record an operation, unless it only allocates memory."""
    if name.startswith("aten::empty"):
        return
    for work in recorders:
        work.launches[name] = work.launches.get(name, 0) + 1


def note_wait(name: str) -> None:
    """Record that the host waits for the device, or refuse it, as torch's sync debug mode does."""
    global _long_work
    finish_copies()
    _long_work = None
    if _capture is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
    if recorders:
        line = f"{name} at {_calling_line()}"
        for work in recorders:
            work.waits.append(line)
    if _sync_mode == 2:
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")
    if _sync_mode == 1:
        warnings.warn(f"called a synchronizing CUDA operation ({name})", stacklevel=4)


def _calling_line() -> str:
    """Return file and line of the innermost frame outside torch and this folder."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/pretend_" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "C++"


def _set_sync_mode(mode: int | str) -> None:
    global _sync_mode
    _sync_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode


# Copies -------------------------------------------------------------------------------------------

# Copies that have been submitted but not done: (target, source) on the host.
_downloads: list[tuple[Tensor, Tensor]] = []
_uploads: list[tuple[Tensor, Tensor]] = []
_copies_lock = threading.RLock()


def _note_copy(direction: str) -> None:
    for work in recorders:
        work.copies[direction] = work.copies.get(direction, 0) + 1


def download(target: Tensor, source: Tensor, *, is_late: bool) -> None:
    """Copy from the device; a late copy arrives when somebody waits for it.

    Until then the target has values that no calculation should have: NaN, or the smallest integer.
    """
    _note_copy("to the host")
    if not is_late:
        note_wait("copy to the host")
        target.copy_(source)
        return
    with _copies_lock:
        # The device works in order, so the value is that of now.
        _downloads.append((target, source.clone()))
        _fill_with_garbage(target)


def upload(target: Tensor, source: Tensor, *, is_late: bool, waits: bool) -> None:
    """Copy to the device; a late copy reads the source when the device next works."""
    _note_copy("from the host")
    if is_late:
        with _copies_lock:
            _uploads.append((target, source))
        return
    if waits:
        note_wait("copy from the host")
    target.copy_(source)


def _fill_with_garbage(target: Tensor) -> None:
    if target.is_floating_point() or target.is_complex():
        target.fill_(float("nan"))
    elif target.dtype is not torch.bool:
        target.fill_(torch.iinfo(target.dtype).min)


def finish_uploads() -> None:
    """Do the copies to the device that come before its next operation."""
    if _uploads:
        with _copies_lock:
            for target, source in _uploads:
                target.copy_(source)
            _uploads.clear()


def finish_copies() -> None:
    """Do all copies, as after a wait."""
    finish_uploads()
    if _downloads:
        with _copies_lock, below_autograd():
            for target, source in _downloads:
                target.copy_(source)
            _downloads.clear()


# Random numbers -----------------------------------------------------------------------------------

_random_states: dict[int, Tensor] = {}
_random_lock = threading.RLock()
_DEFAULT_SEED = 67280421310721


def _random_state(index: int) -> Tensor:
    if index not in _random_states:
        _random_states[index] = torch.Generator().manual_seed(_DEFAULT_SEED).get_state()
    return _random_states[index]


@contextlib.contextmanager
def random_stream(index: int) -> Iterator[None]:
    """Draw from the random stream of a device instead of the host's."""
    # The replicas of DataParallel draw in threads, and the host's generator is exchanged.
    with _random_lock:
        host_state = torch.default_generator.get_state()
        torch.default_generator.set_state(_random_state(index))
        try:
            yield
        finally:
            _random_states[index] = torch.default_generator.get_state()
            torch.default_generator.set_state(host_state)


def _get_random_state(device: Any = None) -> Tensor:
    _lazy_init()
    return _random_state(_index(device)).clone()


def _set_random_state(state: Tensor, device: Any = None) -> None:
    _lazy_init()
    _random_states[_index(device)] = state.clone()


def _get_random_states() -> list[Tensor]:
    return [_get_random_state(index) for index in range(pretend_library.device_count)]


def _set_random_states(states: Any) -> None:
    for index, state in enumerate(states):
        _set_random_state(state, index)


def _seed(seed: int) -> None:
    _seed_device(seed, current_device())


def _seed_all(seed: int) -> None:
    for index in range(max(pretend_library.device_count, 1)):
        _seed_device(seed, index)


def _seed_device(seed: int, index: int) -> None:
    _random_states[index] = torch.Generator().manual_seed(int(seed)).get_state()


# Graphs -------------------------------------------------------------------------------------------

_capture: list[Any] | None = None
_before_capture: list[tuple[Tensor, Tensor]] = []


def keep_before_capture(aliases: list[Tensor]) -> None:
    """Keep what an operation will overwrite: a capture must not change memory."""
    if _capture is not None:
        _before_capture.extend((alias, alias.clone()) for alias in aliases)


def capture(*call: Any) -> None:
    if _capture is not None:
        _capture.append(call)


class CUDAGraph:
    """Operations that were recorded in a capture and are run again by `replay`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Any] = []
        self.memory: object = object()

    def pool(self) -> object:
        """Return what stands for the graph's memory; graphs that share it return the same."""
        return self.memory

    def replay(self) -> None:
        finish_uploads()
        with below_autograd(), torch.no_grad():
            for op, values, options, results, index, is_random, _ in self.calls:
                with random_stream(index) if is_random else contextlib.nullcontext():
                    if op.name() == "aten::copy_":
                        new_results = values[0].copy_(values[1])
                    else:
                        new_results = op(*values, **options)
                for result, new_result in zip(
                    tree_leaves(results), tree_leaves(new_results), strict=True
                ):
                    is_other = isinstance(new_result, Tensor) and new_result is not result
                    if is_other and new_result.data_ptr() != result.data_ptr():
                        result.copy_(new_result)


# The memory of each captured graph.
pools: list[object] = []


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Record the operations of this context in a graph, and undo what they write."""
    global _capture
    _capture = cuda_graph.calls
    cuda_graph.memory = pool or cuda_graph.memory
    pools.append(cuda_graph.memory)
    _before_capture.clear()
    states = dict(_random_states)
    try:
        yield
    finally:
        _capture = None
        for alias, before in reversed(_before_capture):
            alias.copy_(before)
        _before_capture.clear()
        _random_states.update(states)


# Functions of torch -------------------------------------------------------------------------------


class Stream:
    """A stream in which all work is done when it is submitted, except for late copies."""

    cuda_stream = stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device(KIND.type, _index(device))

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")

    def query(self) -> bool:
        return not _downloads

    def is_capturing(self) -> bool:
        return _capture is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """An event that is complete once the copies that precede it are done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._preceding: list[tuple[Tensor, Tensor]] = []
        self._long_work: object | None = None

    def record(self, stream: Any = None) -> None:
        self._preceding = list(_downloads)
        self._long_work = _long_work

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        """Return whether it is complete; each call that returns False completes the copies.

        Work of `torch.cuda._sleep` ends only when the host waits for the device.
        """
        if self._long_work is not None and self._long_work is _long_work:
            return False
        is_complete = not any(copy is late for copy in self._preceding for late in _downloads)
        if not is_complete:
            finish_copies()
        return is_complete

    def synchronize(self) -> None:
        if self.query():
            return
        note_wait("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> StreamContext:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _lazy_init() -> None:
    _module._initialized = True


def _synchronize(device: Any = None) -> None:
    note_wait("synchronize")


def _physical_index(index: int) -> str:
    """Return the position of a device in the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index] if visible else str(index)


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="Pretend",
        total_memory=_TOTAL_MEMORY,
        uuid=f"GPU-{_physical_index(_index(device))}",
        major=8,
        minor=0,
        multi_processor_count=1,
        warp_size=32,
    )


def _current_device_after_init() -> int:
    _lazy_init()
    return current_device()


def _set_device(device: Any) -> None:
    _lazy_init()
    _exchange_device(_index(device))


def _allocated(device: Any = None) -> int:
    return int(library.pretend_allocated(_index(device)))


def _peak(device: Any = None) -> int:
    return int(library.pretend_peak(_index(device)))


def _reset_peak(device: Any = None) -> None:
    library.pretend_reset_peak(_index(device))


def _sleep(cycles: int) -> None:
    global _long_work
    _long_work = object()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _functions(count: int) -> dict[str, Callable[..., Any] | type]:
    return {
        "_lazy_init": _lazy_init,
        "is_available": lambda: count > 0,
        "is_initialized": lambda: _module._initialized,
        "device_count": lambda: count,
        "current_device": _current_device_after_init,
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "set_stream": _nothing,
        "synchronize": _synchronize,
        "_sleep": _sleep,
        "empty_cache": _nothing,
        "memory_allocated": _allocated,
        "memory_reserved": _allocated,
        "max_memory_allocated": _peak,
        "max_memory_reserved": _peak,
        "reset_peak_memory_stats": _reset_peak,
        "mem_get_info": lambda device=None: (_TOTAL_MEMORY - _allocated(device), _TOTAL_MEMORY),
        # torch.mps has only these for its memory.
        "current_allocated_memory": _allocated,
        "driver_allocated_memory": _allocated,
        "recommended_max_memory": lambda: _TOTAL_MEMORY,
        "memory_stats": lambda device=None: {},
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: "Pretend",
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: _capture is not None,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "get_sync_debug_mode": lambda: _sync_mode,
        "set_sync_debug_mode": _set_sync_mode,
        "get_rng_state": _get_random_state,
        "set_rng_state": _set_random_state,
        "get_rng_state_all": _get_random_states,
        "set_rng_state_all": _set_random_states,
        "manual_seed": _seed,
        "manual_seed_all": _seed_all,
        "_is_in_bad_fork": lambda: False,
    }


def _separate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own: the compiler refuses two names with the same function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def install(count: int) -> None:
    """Replace the functions of torch's module of the devices and of `torch.accelerator`."""
    import torch.accelerator
    import torch.cuda.memory
    import torch.cuda.nccl
    import torch.cuda.random
    import torch.xpu.random

    functions = _functions(count)
    for name, function in functions.items():
        is_class = name in ("Stream", "Event", "StreamContext", "CUDAGraph", "graph")
        for module in (_module, getattr(_module, "random", None)):
            # A kind lacks the functions that its module lacks.
            if hasattr(module, name):
                setattr(module, name, function if is_class else _separate(function))
    _module._initialized = False
    if KIND.type == "cuda":
        _install_cuda()
    elif KIND.type == "mps":
        torch._C._has_mps = True  # type: ignore[attr-defined]
        torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: count > 0
    # Streams and events of any device, which torch.mps offers in this form only.
    torch.Event = Event  # type: ignore[misc, assignment]
    accelerator: dict[str, Callable[..., Any]] = {
        "is_available": lambda: count > 0,
        "current_accelerator": lambda check_available=False: torch.device(KIND.type),
        "device_count": lambda: count,
        "current_device_index": current_device,
        "set_device_index": lambda device: _exchange_device(_index(device)),
        "synchronize": _synchronize,
        "_sleep": _sleep,
        "current_stream": Stream,
    }
    for name, function in accelerator.items():
        setattr(torch.accelerator, name, _separate(function))
    Tensor.record_stream = _nothing  # type: ignore[method-assign, assignment]
    install_storages()


def _install_cuda() -> None:
    # It would warn that NCCL is missing; copies between devices do without.
    torch.cuda.nccl.is_available = lambda tensors: False
    # torch would ask CUDA's library for its version.
    torch._C._show_config = lambda: "PyTorch with pretend devices"
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_getDevice = current_device
    torch._C._cuda_setDevice = _exchange_device
