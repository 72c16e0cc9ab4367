"""The wrapper for several copies of a model in one process."""

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
from .replicate import parts_of, refuse_compiled, replicate, run_callbacks, run_copies
from .scatter_gather import Gather, Scatter, Scattered, dict_gather, scatter_batch, user_scattered
from .session import ReplicationSession

_CPU = torch.device("cpu")
_SESSION = "_replication_session"
# By the names that a config can give.
_STRATEGIES = {"user_scattered": user_scattered, "dict_gather": dict_gather}


@MODEL_WRAPPERS.register_module(
    name=["ReplicationCallbackDataParallel", "DataParallelWithCallback", "JacDataParallel"]
)
class ReplicationCallbackDataParallel(DataParallel[nn.Module]):
    """torch's ``DataParallel`` that notifies submodules of their copies, on any devices.

    Every forward splits the batch, copies the module to as many devices as there are chunks,
    calls ``__data_parallel_replicate__(ctx, copy_id)`` of every submodule that has it (see
    ``exec_data_parallel_replication_callback``; with one copy too), runs the copies at the same
    time, and joins their outputs. Gradients sum into the parameters of ``module``. Copies live
    for one forward.

    Copies run in threads, copy 0 of a small model in the calling one. Of what is set for the
    calling thread they have grad and inference mode, autocast, the default device, hooks on saved
    tensors and context variables. ``torch.profiler`` sees them with ``profile_all_threads``. On
    the CPU they are for trying out, not for speed: autograd has one thread there for the backward.
    ``torch.compile`` around this wrapper leaves its forward uncompiled.

    Args:
        module: the model, on the first of the devices.
        device_ids: one entry per copy: CUDA ids or devices, "cpu", repeated at will, such as
            ``["cpu", "cpu"]``; default: all CUDA devices for a module on CUDA, else one copy
            on the CPU.
        output_device: where the outputs are joined; default: the first device.
        dim: the dimension of the samples, in inputs and outputs.
        scatter: called as ``scatter(inputs, kwargs, devices, dim)``; returns the positional
            and the keyword arguments of every copy; default: ``torch.chunk`` of every tensor,
            another one is ``user_scattered``, also by its name.
        gather: called as ``gather(outputs, output_device, dim)``; default: ``dict_gather``.
            With one device the output of the copy is returned unchanged.
        timeout_s: how long copies wait for each other inside a layer that synchronises them;
            a slow forward that no copy waits for has no limit.

    Raises:
        ValueError: a CUDA device that is not there, or no device.
        TypeError: a part of the module is compiled.
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
        # Not DataParallel's own: it refuses the CPU, and forgets its arguments without a GPU.
        nn.Module.__init__(self)
        if device_ids is not None and not device_ids:
            raise ValueError("device_ids must name a device; leave it out for the default")
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
        """Call the copies on their parts of the batch; returns their outputs, joined.

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
        return self._called_back(replicate(module, _devices(device_ids)))

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split positional and keyword arguments over the devices."""
        strategy = self.scatter_strategy or scatter_batch
        return strategy(tuple(inputs), dict(kwargs or {}), _devices(device_ids), self.dim)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> Any:
        """Call every copy in a thread of its own; returns the list of their outputs."""
        # Taken out: the first copy may be a module that outlives the forward.
        session = replicas[0].__dict__.pop(_SESSION, None)
        if session is None:
            session = ReplicationSession(len(replicas), self.timeout_s)
        devices = self._copy_devices()[: len(replicas)]
        return run_copies(replicas, inputs, kwargs, devices=devices, session=session)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs of the copies on the output device."""
        strategy = self.gather_strategy or dict_gather
        return strategy(outputs, _device(output_device, "output_device"), self.dim)

    def _outputs(self, inputs: Any, kwargs: Any) -> tuple[list[Any], Scattered]:
        """What the copies return, and the arguments that each of them had."""
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

    def _called_back(self, copies: list[nn.Module]) -> list[nn.Module]:
        if _SESSION not in copies[0].__dict__:
            session = ReplicationSession(len(copies), self.timeout_s)
            run_callbacks(copies, session)
            copies[0].__dict__[_SESSION] = session
        return copies

    def _copy_devices(self) -> list[torch.device]:
        if self.device_ids:
            return _devices(self.device_ids)
        tensor = next(_tensors(self.module), None)
        if tensor is None or not tensor.is_cuda:
            return [_CPU]
        return _devices(range(torch.cuda.device_count()))

    def _output_device(self) -> torch.device:
        given = self.output_device
        return self._copy_devices()[0] if given is None else _device(given, "output_device")


def patch_replication_callback(data_parallel: DataParallel[Any]) -> None:
    """Have a ``DataParallel`` made elsewhere run the callbacks, as if it were one of ours.

    Works in place, once however often it is called, and stays through ``deepcopy`` and pickle.
    Its type becomes ``ReplicationCallbackDataParallel``, or a subclass of that and of its own
    type, whose overridden methods are used.

    Raises:
        AssertionError: not a ``DataParallel``.
    """
    if not isinstance(data_parallel, DataParallel):
        # As documented by the systems this is for.
        raise AssertionError(f"expected a DataParallel, got {type(data_parallel).__name__}")
    data_parallel.__class__ = _patched(type(data_parallel))  # type: ignore[arg-type]


class _Patched:
    """What a patched object has in front of the methods of its own class."""

    _patched_from: type[DataParallel[Any]]

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy by the own class, which may do it without ours; call back in either case."""
        copies: list[nn.Module] = super().replicate(module, device_ids)  # type: ignore[misc]
        called: list[nn.Module] = self._called_back(copies)  # type: ignore[attr-defined]
        return called

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name to be found under: it is made again from the original one.
        make, arguments, *rest = tuple(super().__reduce_ex__(protocol))
        original = (self._patched_from if one is type(self) else one for one in arguments)
        return _make_patched, (make, tuple(original)), *rest


@cache
def _patched(kind: type[DataParallel[Any]]) -> type[DataParallel[Any]]:
    if issubclass(kind, ReplicationCallbackDataParallel):
        return kind
    if kind is DataParallel:
        return ReplicationCallbackDataParallel
    # Ours comes last, where the original class looks for torch's.
    names = {"_patched_from": kind, "__module__": kind.__module__}
    return type(kind.__name__, (_Patched, kind, ReplicationCallbackDataParallel), names)


def _make_patched(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = make(*arguments)
    patch_replication_callback(made)
    return made


def _devices(given: Iterable[Any]) -> list[torch.device]:
    return [_device(one, "device_ids") for one in given]


def _device(given: Any, setting: str) -> torch.device:
    """``given`` (a number is a CUDA device) as a device that exists."""
    if given == _CPU:
        return _CPU
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type == "cpu":
        return _CPU
    if device.type != "cuda":
        raise ValueError(f"{setting} must name CUDA devices or cpu, got {device}")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(
            f"{setting} names {device}, but there are {count} CUDA devices"
            + ("" if count else '; several copies on the CPU are ["cpu", "cpu"]')
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _callable(given: Any, setting: str) -> Any:
    if isinstance(given, str):
        if given not in _STRATEGIES:
            allowed = " or ".join(_STRATEGIES)
            raise ValueError(f"{setting} must be a function, or {allowed}, got {given!r}")
        return _STRATEGIES[given]
    if given is not None and not callable(given):
        raise TypeError(f"{setting} must be a function, got {type(given).__name__}")
    return given


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, those that occur twice as often."""
    for part in parts_of(module):
        for tensor in chain(part._parameters.values(), part._buffers.values()):
            if tensor is not None:
                yield tensor
