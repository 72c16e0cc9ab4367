"""Where this process's part of a tensor lies in the whole, for any mixture of three kinds: torch's
``DTensor`` (FSDP2), *localised* parameters (ordinary ones that hold one part of a tensor-parallel
weight and say so by an attribute ``tensor_layout``), and plain ones, which are whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Layout:
    """The place of one process's part in a whole tensor.

    Attributes:
        shape: of the whole tensor.
        offsets: where the part begins, by dimension.
        sizes: of the part; a size may be 0.
        sharded_over: the groups over whose ranks the parts are spread; empty where each
            process has the whole.
        mesh: of a ``DTensor``, or what a localised parameter was before; None for plain ones.
        placements: the same, by mesh dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sharded_over: tuple[ProcessGroup, ...] = ()
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the part out of the whole."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    def __deepcopy__(self, memo: Any) -> Layout:
        """Itself: a copy is in the same place."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: parts cannot leave the processes that they are spread over."""
        raise TypeError(refusal("a layer split over a tensor axis"))


def refusal(what: str) -> str:
    """Why ``what`` cannot be pickled, and what can."""
    return (
        f"{what} cannot be pickled, because it is tied to this group of processes: pickle the bare "
        "model before it is split and wrapped, or save state_dict() and load it into a new one; "
        "copy.deepcopy works"
    )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether ``value`` is a ``DTensor``."""
    # Importing them costs as much as half of torch; before somebody has, there is none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def layout_of(tensor: Tensor) -> Layout:
    """Return the place of ``tensor``'s part; RuntimeError where parts are still to be summed."""
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


def is_placed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor`` or localised, be it spread over ranks or not."""
    return is_dtensor(tensor) or _localised(tensor) is not None


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is spread over several processes."""
    return bool(_groups(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of ``tensor``, in the same memory; ``tensor`` where plain."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        # Without gradients this is the part itself and no node of a graph.
        part: Tensor = tensor.to_local()
    return part


def as_global(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part ``tensor`` as a ``DTensor`` laid out as ``like``; itself where plain.

    Raises:
        ValueError: its shape is not that of ``like``'s part.
    """
    if is_dtensor(tensor) or not is_placed(like):
        return tensor
    layout = layout_of(like)
    if tuple(tensor.shape) != layout.sizes:
        raise ValueError(
            f"a part of shape {layout.sizes} is needed for a tensor of shape {layout.shape}, "
            f"got {tuple(tensor.shape)}"
        )
    return placed_as(tensor, layout)


def placed_as(part: Tensor, layout: Layout) -> Tensor:
    """Return ``part`` as the ``DTensor`` that ``layout`` describes; itself where plain."""
    if layout.mesh is None:
        return part
    # Not at the top of the file: it takes as long as half of torch.
    from torch.distributed.tensor import DTensor

    shape = torch.Size(layout.shape)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    with torch.no_grad():
        return DTensor.from_local(
            part.detach(),
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=shape,
            stride=stride,
        )


def take_part(source: Any, like: Tensor) -> Tensor:
    """Return this process's part of ``source``, of the kind, dtype and device of ``like``.

    Args:
        source: a whole tensor, or anything with ``shape`` and ``[slices]`` that returns
            tensors; also a tensor with the layout of ``like``, whose memory may be shared.
            A ``DTensor`` of another layout is gathered, for which every rank must call this.
        like: a ``DTensor`` gives a ``DTensor``, a localised or plain parameter a plain tensor;
            ValueError where its whole has another shape than ``source``.
    """
    part = _cut(source, like).to(device=local_part(like).device, dtype=like.dtype)
    return as_global(part, like) if is_dtensor(like) else part


@torch.no_grad()
def copy_whole_(target: Tensor, source: Any) -> None:
    """Copy this process's part of ``source`` into ``target``; arguments as in `take_part`."""
    local_part(target).copy_(_cut(source, target))


def reshard(model: nn.Module) -> None:
    """Give up what FSDP2 has put together for a forward, so that only parts are left; local.

    The outermost module keeps its parameters whole after a forward without a backward, and the
    next forward would not see a change of the parts.
    """
    module: Any
    for module in model.modules():
        # FSDP2 makes classes with this method; its module is not imported for others' sake.
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()


def total_norm(
    tensors: Iterable[Tensor], norm_type: float = 2.0, *, like: Iterable[Tensor] | None = None
) -> Tensor:
    """Return the norm of all ``tensors`` as one vector: a plain 0-d tensor, equal on every rank.

    Every rank must call this where a tensor is sharded, each with the same tensors in the
    same order.

    Args:
        norm_type: the order of the norm, above 0 (ValueError) for sharded ones; ``math.inf`` for
            the largest.
        like: the parameters whose gradients ``tensors`` are; needed where they are localised.
    """
    tensors = list(tensors)
    owners = tensors if like is None else list(like)
    parts = [local_part(tensor) for tensor in tensors]
    groups = [_groups(owner) for owner in owners]
    if not any(groups):
        return get_total_norm(parts, norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type must be above 0 for sharded tensors, got {norm_type!r}")
    by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for part, over in zip(parts, groups, strict=True):
        by_groups.setdefault(over, []).append(part)
    inf = math.isinf(norm_type)
    device = _comm_device(next(one for one, over in zip(owners, groups, strict=True) if over))
    powers = {over: _power(some, norm_type).to(device) for over, some in by_groups.items()}
    # Each value over its groups, all values of a group in one collective.
    for group in dict.fromkeys(group for over in powers for group in over):
        concerned = [over for over in powers if group in over]
        values = torch.stack([powers[over] for over in concerned])
        all_reduce(values, ReduceOp.MAX if inf else ReduceOp.SUM, group)
        powers.update(zip(concerned, values.unbind(), strict=True))
    values = torch.stack(list(powers.values()))
    total = values.max() if inf else values.sum() ** (1.0 / norm_type)
    dtype = torch.float64 if torch.float64 in {part.dtype for part in parts} else torch.float32
    return total.to(device=parts[0].device, dtype=dtype)


# Models with split layers, the tensor group, and whether every rank of the run is in such a group:
# the ranks of a group must train alike what each of them holds whole.
split_models: WeakKeyDictionary[nn.Module, tuple[ProcessGroup, bool]] = WeakKeyDictionary()

# What keeps whole parameters and gradients where optimizer wrappers do not look. Each one has a
# ``module``, whether the model ``steps_itself``, and, not collective, ``no_sync()``;
# ``drop_gradients(ids)``, which drops those not given to these parameters yet; and
# ``gathered(parameters)``, the first that is there for a forward only.
holders: WeakSet[Any] = WeakSet()


def drop_held_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop gradients of ``parameters`` that wait for the end of their window; not collective.

    Under fsdp, those of the forwards under ``no_sync``, and those of a backward that raised.
    """
    chosen = {id(one) for one in parameters} if holders else ()
    for holder in list(holders):
        holder.drop_gradients(chosen)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients of the forwards inside on their ranks, where ``model`` steps itself."""
    inside = {id(one) for one in model.modules()} if holders else ()
    with ExitStack() as stack:
        for holder in list(holders):
            if holder.steps_itself and id(holder.module) in inside:
                stack.enter_context(holder.no_sync())
        yield


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what ``optimizer`` updates."""
    return (one for group in optimizer.param_groups for one in group["params"])


_seen: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], bool]] = WeakKeyDictionary()


def has_placed(optimizer: Optimizer) -> bool:
    """Whether a parameter of ``optimizer`` is a ``DTensor`` or localised."""
    # By the sizes of the groups: asking each parameter on each step costs as much as clipping.
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    known, answer = _seen.get(optimizer, ((), False))
    if known != sizes:
        answer = any(map(is_placed, parameters_of(optimizer)))
        _seen[optimizer] = (sizes, answer)
    return answer


def _localised(tensor: Tensor) -> Layout | None:
    return getattr(tensor, "tensor_layout", None)


def _groups(tensor: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups over which ``tensor`` is spread, as in ``Layout.sharded_over``."""
    if not is_dtensor(tensor):
        return getattr(_localised(tensor), "sharded_over", ())
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _cut(source: Any, like: Tensor) -> Tensor:
    layout = layout_of(like)
    if isinstance(source, Tensor) and is_placed(source):
        own = layout_of(source)
        if (own.shape, own.offsets, own.sizes) == (layout.shape, layout.offsets, layout.sizes):
            return local_part(source).detach()
        source = placed_as(local_part(source), own).full_tensor()  # type: ignore[attr-defined]
    if tuple(source.shape) != layout.shape:
        raise ValueError(
            f"a tensor of shape {layout.shape} is needed, got one of shape {tuple(source.shape)}"
        )
    if isinstance(source, Tensor) and layout.sizes == layout.shape:
        return source.detach()
    part: Tensor = source[layout.slices]
    # A view would keep the memory of the whole.
    return part.detach().clone() if isinstance(source, Tensor) else part


def _power(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of ``parts`` to the power in which norms of several processes add up."""
    # An empty part has no largest element; without any torch gives 0.
    norm = get_total_norm([part for part in parts if part.numel()], norm_type).double()
    return norm if math.isinf(norm_type) else norm**norm_type


def _comm_device(owner: Tensor) -> torch.device:
    """Where the groups of a sharded tensor communicate; its parts may be offloaded from there."""
    mesh, here = layout_of(owner).mesh, local_part(owner).device
    return here if mesh is None or mesh.device_type == here.type else torch.device(mesh.device_type)
