"""That the ranks of a tensor group train alike what each of them holds whole.

A layer outside of the plan that sees a part of the sequence, or of the features, gets the gradient
of that part. Nothing fails then: the ranks' weights drift apart, and so do the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from ...collectives import comm_device
from .layout import layout_of, local_part

# Relative to the gradient: far above what kernels that add in any order make of it.
_TOLERANCE = 0.02
# Relative to the largest gradient: what is smaller may be nothing but rounding.
_NOISE = 1e-3

# Models with split layers, the tensor group, and whether all ranks have such a model.
_split: WeakKeyDictionary[nn.Module, tuple[ProcessGroup, bool]] = WeakKeyDictionary()


def expect_alike(model: nn.Module, group: ProcessGroup, *, everywhere: bool) -> None:
    """Let ``compare_first_update`` know of ``model``, whose layers are split over ``group``.

    Args:
        everywhere: whether every rank of the run is in such a group.
    """
    _split[model] = group, everywhere


def compare_first_update(optimizer: Optimizer) -> None:
    """Compare gradients before the first step of ``optimizer``, where its model is split.

    That step raises RuntimeError, on all ranks, where a parameter that all ranks of a tensor group
    hold whole has another gradient on each.
    """
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for model, (group, everywhere) in _split.items():
        if any(id(one) in own for one in model.parameters()):
            check = _FirstStep(model, group, everywhere)
            optimizer.register_step_pre_hook(check)


class _FirstStep:
    """What an optimizer calls before its steps; only the first call does anything."""

    def __init__(self, model: nn.Module, group: ProcessGroup, everywhere: bool) -> None:
        self._model = model
        self._group = group
        self._everywhere = everywhere
        self._has_stepped = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._has_stepped:
            return
        self._has_stepped = True
        own = {id(one) for part in optimizer.param_groups for one in part["params"]}
        named = {
            name: one
            for name, one in self._model.named_parameters()
            if id(one) in own and one.requires_grad and not _is_split(one, self._group)
        }
        _compare(named, self._group, self._everywhere)


def _is_split(parameter: Tensor, group: ProcessGroup) -> bool:
    # By their ranks: of equal meshes made one after the other torch keeps the first one's groups.
    ranks = distributed.get_process_group_ranks(group)
    over = layout_of(parameter).sharded_over
    return any(distributed.get_process_group_ranks(one) == ranks for one in over)


def _compare(named: dict[str, nn.Parameter], group: ProcessGroup, everywhere: bool) -> None:
    # Of what is infinite or no number nothing can be said; it is found elsewhere.
    differs, _ = compare_gradients(named.values(), group, tolerance=_TOLERANCE, noise=_NOISE)
    # As many as there are from the first one on, so that the greatest number is the first of all.
    wrong = differs.nonzero()
    left = torch.tensor(len(differs) - int(wrong[0]) if len(wrong) else 0)
    if everywhere:
        left = left.to(comm_device())
        distributed.all_reduce(left, ReduceOp.MAX)
    if left.item():
        _fail(list(named)[-int(left.item())], group)


@torch.no_grad()
def compare_gradients(
    parameters: Iterable[Tensor], group: ProcessGroup | None, *, tolerance: float, noise: float
) -> tuple[Tensor, bool]:
    """Return which gradients differ between the ranks, and whether all are finite; collective.

    Args:
        tolerance: what may differ, relative to the gradient.
        noise: what is too small to be compared, relative to the largest gradient.
    """
    # One more, so that there is something to send.
    own = torch.stack([_digest(None), *(_digest(one.grad) for one in parameters)])
    own = own.to(comm_device(group))
    everywhere = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(everywhere, own, group=group)
    digests = torch.stack(everywhere).cpu()[:, 1:]
    norms = digests[..., 0].amax(0)
    is_finite = bool(norms.isfinite().all())
    norms = norms.nan_to_num(0.0, 0.0)
    apart = (digests - digests[0]).abs().amax((0, 2))
    largest = norms.max() if len(norms) else 0.0
    return (apart > tolerance * norms) & (norms > noise * largest), is_finite


def _digest(gradient: Tensor | None) -> Tensor:
    """The norm of a gradient and sums over three of its parts; zeros where there is none."""
    if gradient is None:
        return torch.zeros(4, dtype=torch.float64)
    own = local_part(gradient)
    values = own.coalesce().values() if own.is_sparse else own
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    middle = len(flat) // 2
    parts = (flat[:middle], flat[middle:], flat[::2])
    sums = [part.sum(dtype=torch.float64) for part in parts]
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.stack([norm, *sums]).cpu()


def _fail(name: str, group: ProcessGroup) -> None:
    ranks = ", ".join(map(str, distributed.get_process_group_ranks(group)))
    raise RuntimeError(
        f"the gradient of {name!r} is not the same on the ranks of a tensor group (here {ranks}), "
        "each of which holds this parameter whole and would train it apart. Either the plan leaves "
        "out a layer that sees a part of the sequence or of the features: give it a style (such "
        'as "sequence" for a norm), or let the layer before give out whole tensors ("replicate"). '
        "Or these ranks do not see the same batches, or draw other random numbers"
    )
