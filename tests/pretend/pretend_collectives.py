"""Collectives of pretend devices: "NCCL" is gloo on the same memory; copies between devices."""

from __future__ import annotations

import warnings
from typing import Any

import pretend_runtime as runtime
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from pretend_tensors import below_autograd, host_alias, move_to_device
from torch import Tensor

_libraries: list[torch.library.Library] = []
# Arguments of collectives that may not have finished: gloo reads and writes them later.
_in_flight: list[Any] = []
# The back-end that the program asked for.
_requested_backend: str | None = None
_create_group, _group_config, _barrier = (
    dist.init_process_group,
    dist.get_backend_config,
    dist.barrier,
)


def _run_collective(op: Any, *args: Any) -> Any:
    for work in runtime.recorders:
        work.collectives[op.name()] = work.collectives.get(op.name(), 0) + 1
    runtime.finish_uploads()
    originals: dict[int, Tensor] = {}

    def convert_argument(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            alias = host_alias(value)
            originals[id(alias)] = value
            return alias
        if isinstance(value, (list, tuple)):
            return [convert_argument(element) for element in value]
        return value

    def convert_result(value: Any) -> Any:
        if isinstance(value, Tensor):
            return originals.get(id(value)) if id(value) in originals else _find(value, originals)
        if isinstance(value, (list, tuple)):
            return type(value)(convert_result(element) for element in value)
        return value

    with below_autograd():
        values = [convert_argument(value) for value in args]
        if op.name() == "c10d::allreduce_" and not values[0][0].is_floating_point():
            # gloo cannot average integers, as NCCL does.
            return args[0], _reduce_integers(op, values)
        results = op(*values)
        _in_flight.append(values)
        del _in_flight[:-64]
    return convert_result(results)


def _reduce_integers(op: Any, values: list[Any]) -> Any:
    integers, values[0] = values[0], [tensor.double() for tensor in values[0]]
    _, work = op(*values)
    work.wait()
    for tensor, reduced in zip(integers, values[0], strict=True):
        tensor.copy_(reduced)
    return work


def _find(tensor: Tensor, originals: dict[int, Tensor]) -> Tensor:
    for original in originals.values():
        if original.data_ptr() == tensor.data_ptr() and original.shape == tensor.shape:
            return original
    return move_to_device(tensor, runtime.current_device())


def _init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    global _requested_backend
    kwargs.pop("device_id", None)
    _requested_backend = backend or "cpu:gloo,cuda:nccl"
    if "nccl" in _requested_backend:
        backend = "cpu:gloo,cuda:gloo"
    _create_group(backend, *args, **kwargs)


def _get_backend_config(group: Any = None) -> str:
    if _requested_backend is None or "nccl" not in _requested_backend:
        return _group_config(group)
    return "cuda:nccl" if _requested_backend == "nccl" else "cpu:gloo,cuda:nccl"


def _barrier_without_device(
    group: Any = None, async_op: bool = False, device_ids: Any = None, **options: Any
) -> Any:
    return _barrier(group, async_op=async_op, **options)


def _scatter(
    tensor: Tensor,
    devices: list[int],
    chunk_sizes: list[int] | None = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[Tensor, ...]:
    chunks = (
        tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    )
    return tuple(
        chunk.to(torch.device("cuda", index)) for chunk, index in zip(chunks, devices, strict=False)
    )


def _gather(tensors: list[Tensor], dim: int, destination: int | None = None) -> Tensor:
    device = torch.device("cpu") if destination == -1 else torch.device("cuda", destination or 0)
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


def _broadcast_coalesced(
    tensors: list[Tensor], devices: list[int], buffer_size: int
) -> list[list[Tensor]]:
    return [[tensor.to(torch.device("cuda", index)) for tensor in tensors] for index in devices]


def _broadcast(tensor: Tensor, devices: list[int]) -> list[Tensor]:
    return [tensor.to(torch.device("cuda", index)) for index in devices]


def install() -> None:
    """Register the collectives, and replace the functions that name a back-end."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch warns about each kernel that is replaced.
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            is_collective = name.startswith("c10d::") and "monitored" not in name
            if is_collective and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                base, _, overload = name.removeprefix("c10d::").partition(".")
                op = getattr(getattr(torch.ops.c10d, base), overload or "default")
                library.impl(op, _bind(op), "CUDA", allow_override=True)
    _libraries.append(library)
    for module in (dist, c10d):
        module.init_process_group = _init_process_group  # type: ignore[assignment]
        module.get_backend_config = _get_backend_config  # type: ignore[assignment]
        module.is_nccl_available = lambda: True
        module.barrier = _barrier_without_device  # type: ignore[assignment]
    torch._C._scatter, torch._C._gather = _scatter, _gather  # type: ignore[assignment]
    torch._C._broadcast_coalesced = _broadcast_coalesced  # type: ignore[assignment]
    torch._C._broadcast = _broadcast


def _bind(op: Any) -> Any:
    def run(*args: Any) -> Any:
        return _run_collective(op, *args)

    return run
