"""Models sharded over ranks in every way, and the same models in plain PyTorch."""

from typing import Any

import torch
import torch.distributed as dist
from marks import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stepwrap.wrappers.layout import as_dtensor, get_layout

# FSDP2 or tensor parallelism alone.
KINDS = ("fsdp", "tensor")
# The number of ranks and the kind.
CASES = [
    *((2, "fsdp"), (2, "tensor"), (4, "fsdp x tensor")),
    *slow((4, "fsdp"), (4, "hsdp"), (4, "tensor"), (4, "data x tensor")),
]


def net(dtype: torch.dtype = torch.float64, seed: int = 0, width: int = 6) -> nn.Sequential:
    """Return a network with layers of a plan (0, 2) and others; some parts are uneven or empty."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 1)
    ).to(dtype)


def spread(model: nn.Module, kind: str) -> nn.Module:
    """Shard `net()` over all ranks in place; every rank must call this."""
    world = dist.get_world_size()
    if kind == "fsdp":
        return _shard(model, init_device_mesh("cpu", (world,)))
    if kind == "hsdp":
        names = ("replicate", "shard")
        return _shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names))
    shape = {"tensor": (1, world)}.get(kind, (world // 2, 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if kind == "fsdp x tensor":
        return _shard(model, mesh["data"])
    for leaf in model.modules():
        _localise(leaf)
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model[4], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _localise(leaf: nn.Module) -> None:
    """Store ordinary parameters as parts and gather them only while the layer runs."""
    placed: dict[str, nn.Parameter] = {}
    for name, placed_param in list(leaf._parameters.items()):
        if isinstance(placed_param, DTensor):
            local = nn.Parameter(placed_param.to_local().detach())
            local.tensor_layout = get_layout(placed_param)
            placed[name] = leaf._parameters[name] = local

    def enter(module: nn.Module, args: Any) -> None:
        for name, local in placed.items():
            layout = local.tensor_layout
            module._parameters[name] = DTensor.from_local(
                local,
                layout.mesh,
                layout.placements,
                run_check=False,
                shape=torch.Size(layout.shape),
                stride=as_dtensor(local, layout).stride(),
            )

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        module._parameters.update(placed)

    if placed:
        leaf.register_forward_pre_hook(enter)
        leaf.register_forward_hook(leave, always_call=True)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor of any kind; every rank must call this."""
    layout = get_layout(tensor)
    if layout.mesh is None:
        return tensor.detach().clone()
    if not isinstance(tensor, DTensor):
        tensor = as_dtensor(tensor, layout)
    return tensor.full_tensor().detach().clone()


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the whole gradient of a parameter; every rank must call this."""
    layout = get_layout(parameter)
    gradient = parameter.grad
    assert gradient is not None
    if layout.mesh is None or isinstance(gradient, DTensor):
        return whole(gradient)
    return as_dtensor(gradient, layout).full_tensor()


def data(seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same inputs (8, 5) on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)


class Readable:
    """A stand-in for a tensor in a file: it has a shape and can be sliced."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.read = 0

    def __getitem__(self, index: Any) -> Tensor:
        chunk = self._tensor[index].clone()
        self.read += chunk.numel()
        return chunk
