"""Layouts: which part of a whole tensor this process holds; norms and broadcasts of such parts.

There are three kinds of tensors: torch's ``DTensor`` (FSDP2); *localised* parameters, which are
ordinary parameters that hold one part of a tensor-parallel weight and have an attribute
``tensor_layout``; and plain tensors, which are whole.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ..collectives.process.ranks import comm_device
from ..primitives.tensor_bits import widened

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_BUCKET_BYTES = 64 * 2**20
# None stands for all ranks of the run.
Ranks: TypeAlias = DeviceMesh | ProcessGroup | None


@dataclass(frozen=True)
class Layout:
    """The position of one process's part in a whole tensor.

    Attributes:
        shape: the shape of the whole tensor.
        offsets: the start of the part, by dimension.
        sizes: the shape of the part; a size may be 0.
        sharded_over: the groups whose ranks hold different parts; empty if each process has the
            whole tensor.
        mesh: the mesh of the ``DTensor``; for a localised parameter, the mesh that it had as a
            ``DTensor``; None for plain tensors.
        placements: the placements of this ``DTensor``, by mesh dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sharded_over: tuple[ProcessGroup, ...] = ()
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the part in the whole tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    def __deepcopy__(self, memo: Any) -> Layout:
        """Return the same object, because copies of a tensor have the same layout."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: parts are tied to their process group."""
        raise TypeError(refusal("a layer split over a tensor axis"))


def refusal(subject: str) -> str:
    """Return the message that ``subject`` cannot be pickled, with alternatives."""
    return (
        f"{subject} cannot be pickled, because it is tied to this group of processes: pickle the "
        "bare model before it is split and wrapped, or save state_dict() and load it into a new "
        "one; copy.deepcopy works"
    )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a ``DTensor``."""
    # Not imported here, because the import is slow. No DTensor exists before it is imported.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def compute_device(tensor: Tensor) -> torch.device:
    """Return the device on which a model uses ``tensor``.

    A shard that FSDP2 keeps in host memory (``cpu_offload``) is gathered on the device of its mesh.
    """
    kind = tensor.device_mesh.device_type if is_dtensor(tensor) else tensor.device.type
    if kind == tensor.device.type:
        return tensor.device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def get_layout(tensor: Tensor) -> Layout:
    """Return the layout of ``tensor``; raise RuntimeError if its placements are partial sums."""
    if is_dtensor(tensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return Layout(
            shape=tuple(tensor.shape),
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            sharded_over=_groups(tensor),
            mesh=tensor.device_mesh,
            placements=tuple(tensor.placements),
        )
    shape = tuple(tensor.shape)
    return _localised(tensor) or Layout(shape, (0,) * len(shape), shape)


def is_dtensor_or_localised(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a ``DTensor`` or localised, even if all of it is here."""
    return is_dtensor(tensor) or _localised(tensor) is not None


def is_sharded(tensor: Tensor) -> bool:
    """Return whether several processes hold different parts of ``tensor``."""
    return bool(_groups(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of ``tensor``, in the same memory; a plain tensor is unchanged."""
    if not is_dtensor(tensor):
        return tensor
    # With gradients enabled, to_local() would add a node to the graph.
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def as_global(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part ``tensor`` as a ``DTensor`` with the layout of ``like``.

    ``tensor`` is returned unchanged if it is a ``DTensor`` already, or if ``like`` is plain.

    Raises:
        ValueError: ``tensor`` does not have the shape of this process's part of ``like``.
    """
    if is_dtensor(tensor) or not is_dtensor_or_localised(like):
        return tensor
    layout = get_layout(like)
    if tuple(tensor.shape) != layout.sizes:
        raise ValueError(
            f"the part of a tensor of shape {layout.shape} must have shape {layout.sizes}, "
            f"got {tuple(tensor.shape)}"
        )
    return as_dtensor(tensor, layout)


def as_dtensor(local: Tensor, layout: Layout) -> Tensor:
    """Return ``local`` as the ``DTensor`` that ``layout`` describes; without a mesh, unchanged."""
    if layout.mesh is None:
        return local
    # Imported here, because the import is slow.
    from torch.distributed.tensor import DTensor

    shape = torch.Size(layout.shape)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    with torch.no_grad():
        return DTensor.from_local(
            local.detach(),
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )


def take_part(source: Any, like: Tensor, *, keep_dtype: bool = False) -> Tensor:
    """Return this process's part of ``source``, with the kind, dtype and device of ``like``.

    Args:
        source: a whole tensor; or an object with a ``shape`` whose slices are tensors; or a tensor
            with the layout of ``like``, whose memory the result may use. A ``DTensor`` with another
            layout is gathered; every rank must then call this.
        like: the result is a ``DTensor`` if ``like`` is one, otherwise a plain tensor.
        keep_dtype: whether the result has the dtype of ``source``.

    Raises:
        ValueError: ``source`` and ``like`` have different shapes as whole tensors.
    """
    shard = _cut(source, like)
    dtype = shard.dtype if keep_dtype else like.dtype
    local = shard.to(device=local_part(like).device, dtype=dtype)
    return as_global(local, like) if is_dtensor(like) else local


@torch.no_grad()
def copy_whole_(target: Tensor, source: Any) -> None:
    """Copy this process's part of ``source`` into ``target``; arguments as in ``take_part``."""
    local_part(target).copy_(_cut(source, target))


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that only shards are left.

    Each rank may call this independently. After a forward without a backward, the outermost module
    keeps its parameters gathered, and the next forward would ignore changes of the shards.
    """
    module: Any
    for module in model.modules():
        # Sharded modules are recognised by this method, because importing FSDP2 is slow.
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()


def total_norm(
    tensors: Iterable[Tensor], norm_type: float = 2.0, *, like: Iterable[Tensor] | None = None
) -> Tensor:
    """Return the norm of all ``tensors`` together, as if they were one vector.

    The result is a plain 0-d tensor, the same on every rank. If a tensor is sharded, every rank
    must call this with the same tensors in the same order.

    Args:
        tensors: plain tensors, DTensors or gradients of localised parameters.
        norm_type: the order of the norm; ``math.inf`` for the largest absolute value.
        like: the parameters to which the gradients ``tensors`` belong; required if parameters are
            localised, because their gradients do not have a layout.

    Raises:
        ValueError: ``norm_type`` is not positive and a tensor is sharded.
    """
    tensors = list(tensors)
    owners = tensors if like is None else list(like)
    local_tensors = [local_part(tensor) for tensor in tensors]
    groups = [_groups(owner) for owner in owners]
    if not any(groups):
        return get_total_norm(local_tensors, norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type must be above 0 for sharded tensors, got {norm_type!r}")
    by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for local, over in zip(local_tensors, groups, strict=True):
        by_groups.setdefault(over, []).append(local)
    inf = math.isinf(norm_type)
    device = _comm_device(next(owner for owner, over in zip(owners, groups, strict=True) if over))
    powers = {over: _power(tensors, norm_type).to(device) for over, tensors in by_groups.items()}
    # Each value is reduced over its groups, in one collective for all values of a group.
    for group in dict.fromkeys(group for over in powers for group in over):
        keys = [over for over in powers if group in over]
        values = torch.stack([powers[over] for over in keys])
        all_reduce(values, ReduceOp.MAX if inf else ReduceOp.SUM, group)
        powers.update(zip(keys, values.unbind(), strict=True))
    values = torch.stack(list(powers.values()))
    total = values.max() if inf else values.sum() ** (1.0 / norm_type)
    dtype = (
        torch.float64
        if torch.float64 in {local.dtype for local in local_tensors}
        else torch.float32
    )
    return total.to(device=local_tensors[0].device, dtype=dtype)


@torch.no_grad()
def broadcast_from_first_rank(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Overwrite ``tensors`` with the tensors of the first rank; every rank must call this.

    Only the local parts of sharded tensors are sent. Tensors on the meta device are skipped.
    """
    buckets: dict[tuple[Any, ...], list[Tensor]] = {}
    num_bytes: Counter[tuple[Any, ...]] = Counter()
    for local in map(local_part, tensors):
        if local.numel() and not local.is_meta:
            kind = (local.dtype, local.device)
            buckets.setdefault((*kind, num_bytes[kind] // _BUCKET_BYTES), []).append(local)
            num_bytes[kind] += local.nbytes
    for group, source in routes(ranks):
        for (_, device, _), bucket in buckets.items():
            _send(bucket, group, source, comm_device(group, prefer=device))


def routes(mesh: Ranks) -> Iterator[tuple[ProcessGroup | None, int]]:
    """Yield a group for each axis, and the rank in it to broadcast from.

    Used one after another, the groups bring the first rank's data to all ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        yield mesh, 0 if mesh is None else distributed.get_global_rank(mesh, 0)
        return
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"rank {distributed.get_rank()} is not in the mesh {mesh}")
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            source = list(coordinate)
            source[axis] = 0
            yield mesh.get_group(axis), int(mesh.mesh[tuple(source)])


def _send(bucket: Sequence[Tensor], group: Any, source: int, device: torch.device) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
    distributed.broadcast(flat, source, group=group)
    if distributed.get_rank() != source:
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, values in zip(bucket, torch.split(flat, sizes), strict=True):
            tensor.copy_(values.view(tensor.shape))


# Models with split layers -> (the tensor group, whether every rank of the run is in such a group).
# A parameter that is not split must get the same gradient on all ranks of the group.
split_models: WeakKeyDictionary[nn.Module, tuple[ProcessGroup, bool]] = WeakKeyDictionary()

# The fsdp roots of this process. They hold gathered parameters and unreduced gradients, which the
# optimizer does not have. Each root has these members:
# - ``module``: the root module;
# - ``may_call_children``: whether the model's step may call its children directly;
# - ``no_sync()``: a context in which gradients are not reduced over the ranks;
# - ``drop_gradients(ids)``: drops the unreduced gradients of the parameters with these ids;
# - ``gathered(parameters)``: returns the first parameter that is a gathered one, not a shard.
fsdp_roots: WeakSet[Any] = WeakSet()


class Unreduced(WeakKeyDictionary[Any, None]):
    """The modules whose last forward with gradients was under ``no_sync``, in this order.

    The order is the same on all ranks. The gradients are reduced over the ranks by the backward of
    the next forward outside of ``no_sync``, or before the update if there was no such forward. Each
    module has a method ``reduce_gradients(ids)``. If the module has a parameter with one of these
    ids, it reduces its gradients and returns True; every rank must then call it.
    """

    def note_forward(self, module: Any, *, is_reduced: bool) -> None:
        """Record whether the backward of a forward of ``module`` reduces its gradients."""
        if not is_reduced:
            self[module] = None
        elif self:
            self.pop(module, None)

    def note_restored(self, model: nn.Module) -> None:
        """Record that gradients from a checkpoint may not be reduced; twice would be right too."""
        for module in model.modules():
            if hasattr(module, "reduce_gradients"):
                self[module] = None

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Reduce the gradients of modules with some of these parameters; every rank must call."""
        chosen = {id(param) for param in parameters} if self else ()
        for module in list(self):
            if module.reduce_gradients(chosen):
                self.pop(module, None)


unreduced = Unreduced()


def drop_unreduced_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop gradients of ``parameters`` that fsdp has not reduced over the ranks yet.

    Such gradients come from forwards under ``no_sync``, and from a backward that raised. Each rank
    may call this independently.
    """
    chosen = {id(param) for param in parameters} if fsdp_roots else ()
    for root in list(fsdp_roots):
        root.drop_gradients(chosen)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce gradients of forwards in this context over the ranks.

    This affects only fsdp roots inside ``model`` whose ``may_call_children`` is true.
    """
    inside = {id(module) for module in model.modules()} if fsdp_roots else ()
    with ExitStack() as stack:
        for root in list(fsdp_roots):
            if root.may_call_children and id(root.module) in inside:
                stack.enter_context(root.no_sync())
        yield


def get_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of ``optimizer``."""
    return (param for group in optimizer.param_groups for param in group["params"])


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Return the L2 norm of the current gradients; every rank must call this."""
    pairs = [(p.grad, p) for p in get_parameters(optimizer) if p.grad is not None]
    return total_norm([gradient for gradient, _ in pairs], like=[param for _, param in pairs])


# Optimizers -> (the sizes of their parameter groups, the result of `has_placed_parameters`).
_placed: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], bool]] = WeakKeyDictionary()


def has_placed_parameters(optimizer: Optimizer) -> bool:
    """Return whether a parameter of ``optimizer`` is a ``DTensor`` or localised."""
    # Cached until a group changes its size, because checking every parameter in each update takes
    # as long as clipping.
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    cached_sizes, answer = _placed.get(optimizer, ((), False))
    if cached_sizes != sizes:
        answer = any(map(is_dtensor_or_localised, get_parameters(optimizer)))
        _placed[optimizer] = (sizes, answer)
    return answer


def _localised(tensor: Tensor) -> Layout | None:
    return getattr(tensor, "tensor_layout", None)


def _groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """Return ``Layout.sharded_over`` of a tensor."""
    if not is_dtensor(tensor):
        return getattr(_localised(tensor), "sharded_over", ())
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _cut(source: Any, like: Tensor) -> Tensor:
    layout = get_layout(like)
    if isinstance(source, Tensor) and is_dtensor_or_localised(source):
        source_layout = get_layout(source)
        if (source_layout.shape, source_layout.offsets, source_layout.sizes) == (
            layout.shape,
            layout.offsets,
            layout.sizes,
        ):
            return local_part(source).detach()
        source = as_dtensor(local_part(source), source_layout).full_tensor()  # type: ignore[attr-defined]
    if tuple(source.shape) != layout.shape:
        raise ValueError(
            f"the whole tensor must have shape {layout.shape}, got shape {tuple(source.shape)}"
        )
    if isinstance(source, Tensor) and layout.sizes == layout.shape:
        return source.detach()
    result: Tensor = source[layout.slices]
    # Cloned, because a view would keep the memory of the whole tensor.
    return result.detach().clone() if isinstance(source, Tensor) else result


def _power(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``shards`` to the power ``norm_type``; these powers can be summed.

    For an infinite ``norm_type``, return the norm itself.
    """
    # Leaves out empty parts, which have no largest element.
    norm = widened(get_total_norm([shard for shard in shards if shard.numel()], norm_type))
    return norm if math.isinf(norm_type) else norm**norm_type


def _comm_device(owner: Tensor) -> torch.device:
    """Return the device on which a sharded tensor's groups communicate.

    The parts may be elsewhere: FSDP2 can offload them to the CPU.
    """
    mesh, device = get_layout(owner).mesh, local_part(owner).device
    return (
        device
        if mesh is None or mesh.device_type == device.type
        else torch.device(mesh.device_type)
    )
