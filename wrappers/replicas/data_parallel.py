"""A ``DataParallel`` for CPU and CUDA devices that calls a method of submodules when they are
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from ...registry import MODEL_WRAPPERS
from ..torch_functions import uncompiled
from .replicate import get_parts, refuse_compiled, replicate, run_callbacks, run_copies
from .scatter_gather import (
    Gather,
    Scatter,
    Scattered,
    dict_gather,
    scatter_batch,
    scatter_samples,
    user_scattered,
)
from .session import ReplicationSession

_CPU = torch.device("cpu")
_SESSION = "_replication_session"
# Strategies that a config can name.
_STRATEGIES = {
    "user_scattered": user_scattered,
    "scatter_samples": scatter_samples,
    "dict_gather": dict_gather,
}


@MODEL_WRAPPERS.register_module(
    name=["ReplicationCallbackDataParallel", "DataParallelWithCallback", "JacDataParallel"]
)
class ReplicationCallbackDataParallel(DataParallel[nn.Module]):
    """A ``DataParallel`` for CPU and CUDA devices that calls submodules back when they are copied.

    Every forward splits the batch into chunks, copies the module to one device per chunk, and calls
    ``__data_parallel_replicate__(ctx, copy_id)`` of every submodule that defines this method, even
    if there is only one copy (see ``exec_data_parallel_replication_callback``). Then it runs the
    copies at the same time and joins their outputs. Gradients are summed in the parameters of
    ``module``. Copies are discarded after the forward.

    The copies run in threads; copy 0 of a small model runs in the calling thread. The threads
    inherit grad and inference mode, autocast, the default device, hooks on saved tensors and
    context variables of the calling thread. ``torch.profiler`` sees them with
    ``profile_all_threads``. Several copies on the CPU are for testing, not for speed, because
    autograd runs the whole CPU backward in one thread. ``torch.compile`` around this wrapper
    leaves its forward uncompiled.

    Args:
        module: the model, on the first device.
        device_ids: one entry per copy: CUDA ids, devices or "cpu", repeated any number of times,
            such as ``["cpu", "cpu"]``; default: all CUDA devices for a module on CUDA, otherwise
            one copy on the CPU.
        output_device: the device on which the outputs are joined; default: the first device.
        dim: the dimension of the samples, in inputs and outputs.
        scatter: "user_scattered", "scatter_samples", or a function
            ``scatter(inputs, kwargs, devices, dim)`` that returns the positional and the keyword
            arguments of every copy; default: ``torch.chunk`` of every tensor.
        gather: a function ``gather(outputs, output_device, dim)``; default: ``dict_gather``.
            With one device the output of the copy is returned unchanged.
        timeout_s: number of seconds for which a copy waits for the others in a layer that
            synchronises them. The time of a forward itself is not limited.

    Raises:
        ValueError: ``device_ids`` is empty, a device is neither CUDA nor CPU or does not exist, or
            ``scatter`` or ``gather`` is an unknown name.
        TypeError: a part of the module is compiled, or ``scatter`` or ``gather`` is not callable.
    """

    dim: int = 0
    output_device: Any = None
    scatter_strategy: Scatter | None = None
    gather_strategy: Gather | None = None
    timeout_s: float = 60.0

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        *,
        scatter: Scatter | str | None = None,
        gather: Gather | str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        # DataParallel.__init__ is not called: it rejects the CPU, and without a GPU it ignores its
        # arguments.
        nn.Module.__init__(self)
        if device_ids is not None and not device_ids:
            raise ValueError(
                "device_ids must name at least one device, got none; omit it for the default"
            )
        self.module = module
        self.device_ids: Any = _devices(device_ids or ())
        if output_device is not None:
            self.output_device = _device(output_device, "output_device")
        self.dim = dim
        self.scatter_strategy = _callable(scatter, "scatter")
        self.gather_strategy = _callable(gather, "gather")
        self.timeout_s = timeout_s
        refuse_compiled(module)

    @uncompiled("its copies are new modules in other threads")
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the copies on their parts of the batch and join their outputs.

        Raises:
            RuntimeError: a parameter or buffer is not on the first device, or a CUDA graph is
                being captured.
            BaseException: the error of the copy that failed first, with the copy and its
                device in a note.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            outputs, _ = self._outputs(inputs, kwargs)
            if len(self._copy_devices()) == 1:
                return outputs[0]
            return self.gather(outputs, self._output_device())

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy ``module`` to the devices and run the callbacks of the copies."""
        return self._call_back(replicate(module, _devices(device_ids)))

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split positional and keyword arguments over the devices."""
        strategy = self.scatter_strategy or scatter_batch
        return strategy(tuple(inputs), dict(kwargs or {}), _devices(device_ids), self.dim)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> Any:
        """Call all copies at the same time; return the list of their outputs."""
        # Removed here, because the first copy may be a module that outlives the forward.
        session = replicas[0].__dict__.pop(_SESSION, None) or self._session(replicas)
        devices = self._copy_devices()[: len(replicas)]
        return run_copies(replicas, inputs, kwargs, devices=devices, session=session)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of the copies on the output device."""
        strategy = self.gather_strategy or dict_gather
        return strategy(outputs, _device(output_device, "output_device"), self.dim)

    def _outputs(self, inputs: Any, kwargs: Any) -> tuple[list[Any], Scattered]:
        """Return the outputs of the copies, and the arguments of each copy."""
        devices = self._copy_devices()
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if started and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph: its copies are new "
                "modules and threads on every forward; capture the model itself, on one device"
            )
        for tensor in _tensors(self.module):
            if tensor.device != devices[0]:
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{devices[0]} (device_ids[0]) but found one of them on device: {tensor.device}"
                )
        chunks, named = self.scatter(inputs, kwargs, devices)
        if not chunks and not named:
            chunks, named = [()], [{}]
        copies = self.replicate(self.module, devices[: len(chunks)])
        return self.parallel_apply(copies, chunks, named), (chunks, named)

    def _call_back(self, copies: list[nn.Module]) -> list[nn.Module]:
        """Run the callbacks of ``copies``, unless a subclass's ``replicate`` has run them."""
        if _SESSION not in copies[0].__dict__:
            session = self._session(copies)
            run_callbacks(copies, session)
            copies[0].__dict__[_SESSION] = session
        return copies

    def _session(self, copies: Sequence[nn.Module]) -> ReplicationSession:
        return ReplicationSession(len(copies), self.timeout_s)

    def _copy_devices(self) -> list[torch.device]:
        if self.device_ids:
            return _devices(self.device_ids)
        tensor = next(_tensors(self.module), None)
        if tensor is None or not tensor.is_cuda:
            return [_CPU]
        return _devices(range(torch.cuda.device_count()))

    def _output_device(self) -> torch.device:
        device = self.output_device
        return self._copy_devices()[0] if device is None else _device(device, "output_device")


def patch_replication_callback(data_parallel: DataParallel[Any]) -> None:
    """Make an existing ``DataParallel`` run the replication callbacks, in place.

    Its class becomes ``ReplicationCallbackDataParallel``. For an instance of a subclass, the new
    class also inherits from this subclass, so that overridden methods are still used. Repeated
    calls change nothing. ``deepcopy`` and pickle keep the new class.

    Raises:
        AssertionError: ``data_parallel`` is not a ``DataParallel``.
    """
    if not isinstance(data_parallel, DataParallel):
        # Earlier implementations document an AssertionError.
        raise AssertionError(f"expected a DataParallel, got {type(data_parallel).__name__}")
    data_parallel.__class__ = _patched(type(data_parallel))  # type: ignore[arg-type]


class _Patched:
    """A mixin that comes before the original class of a patched ``DataParallel``."""

    _patched_from: type[DataParallel[Any]]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy by the original class, then run the callbacks unless that class has run them."""
        copies: list[nn.Module] = super().replicate(module, device_ids)  # type: ignore[misc]
        called: list[nn.Module] = self._call_back(copies)  # type: ignore[attr-defined]
        return called

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle cannot find this class by name, so it is created again from the original one.
        make, arguments, *state = tuple(super().__reduce_ex__(protocol))
        original = (
            self._patched_from if argument is type(self) else argument for argument in arguments
        )
        return _make_patched, (make, tuple(original)), *state


@cache
def _patched(kind: type[DataParallel[Any]]) -> type[DataParallel[Any]]:
    if issubclass(kind, ReplicationCallbackDataParallel):
        return kind
    if kind is DataParallel:
        return ReplicationCallbackDataParallel
    # stepwrap's class comes last, so that super() in the original class finds its methods before
    # torch's.
    names = {"_patched_from": kind, "__module__": kind.__module__}
    return type(kind.__name__, (_Patched, kind, ReplicationCallbackDataParallel), names)


def _make_patched(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    data_parallel = make(*arguments)
    patch_replication_callback(data_parallel)
    return data_parallel


def _devices(devices: Iterable[Any]) -> list[torch.device]:
    return [_device(device, "device_ids") for device in devices]


def _device(device: Any, setting: str) -> torch.device:
    """Return the device for ``device``, in which numbers are CUDA devices; check that it exists."""
    if device == _CPU:
        return _CPU
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu":
        return _CPU
    if device.type != "cuda":
        raise ValueError(f"{setting} must name CUDA devices or cpu, got {device}")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"{setting} names {device}, but there are {count} CUDA devices"
            + ("" if count else '; for two copies on the CPU use ["cpu", "cpu"]')
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _callable(strategy: Any, setting: str) -> Any:
    if isinstance(strategy, str):
        if strategy not in _STRATEGIES:
            allowed = " or ".join(_STRATEGIES)
            raise ValueError(f"{setting} must be a function, or {allowed}, got {strategy!r}")
        return _STRATEGIES[strategy]
    if strategy is not None and not callable(strategy):
        raise TypeError(f"{setting} must be a function, got {type(strategy).__name__}")
    return strategy


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and buffers; a shared tensor is yielded several times."""
    # Faster than `parameters()` and `buffers()`, which build the name of each tensor.
    for child in get_parts(module):
        for tensor in chain(child._parameters.values(), child._buffers.values()):
            if tensor is not None:
                yield tensor
