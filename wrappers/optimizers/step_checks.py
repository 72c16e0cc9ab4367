"""What is looked at before a first update: are there gradients, and the same on all ranks?

Where they are not, nothing fails: the ranks' weights drift apart, and so do the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from ...collectives import comm_device
from ..sharding.layout import is_dtensor, layout_of, local_part, split_models
from .optim_state import parameters_of


class FirstUpdate:
    """Looks at the gradients that an optimizer is about to take for the first time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._model: Any = None
        self._comparisons: list[Callable[[], bool]] | None = None

    def note(self, model: Any) -> None:
        """Learn which wrapper runs the step, if ``model`` is one with a step of its own."""
        if getattr(model, "averages_ranks", False) and has_own_step(model):
            self._model = model

    def check(self, has_run: bool) -> bool:
        """Return whether all is settled; RuntimeError for an update that would train wrongly.

        Every rank of a wrapper that averages gradients, or that splits layers, must call this.

        Args:
            has_run: there has been a backward.
        """
        if self._comparisons is None:
            if not _is_reached(self._optimizer, has_run):
                return False
            self._comparisons = self._find_comparisons()
        # Infinities hide what differs: those are left for the next update.
        self._comparisons = [compare for compare in self._comparisons if not compare()]
        return not self._comparisons

    def _find_comparisons(self) -> list[Callable[[], bool]]:
        parameters = list(parameters_of(self._optimizer))
        own = {id(one) for one in parameters}
        found: list[Callable[[], bool]] = [
            partial(_compare_whole, model, own, group, everywhere)
            for model, (group, everywhere) in split_models.items()
            if any(id(one) in own for one in model.parameters())
        ]
        model = self._model
        if model is not None and _is_averaged(model) and not any(map(is_dtensor, parameters)):
            found.append(partial(_compare_averaged, model, parameters))
        return found


def has_own_step(model: Any) -> bool:
    """Whether a training step is not the usual one of our wrappers: a subclass's, the model's."""
    if getattr(model, "_model_steps", False):
        return True
    owner = next((one for one in type(model).__mro__ if "train_step" in vars(one)), None)
    return owner is None or not owner.__module__.startswith("stepwrap.wrappers.")


def _is_reached(optimizer: Optimizer, has_run: bool) -> bool:
    """Whether there is a gradient; RuntimeError where there should be one."""
    parameters = list(parameters_of(optimizer))
    name = type(optimizer).__name__
    if any(getattr(one, "is_replaced", False) for one in parameters):
        raise RuntimeError(
            f"{name} has parameters that the model has no more, since its layers were split; make "
            "the optimizer after wrapping"
        )
    if any(one.grad is not None for one in parameters):
        return True
    # What is frozen may be trained later, and another wrapper's backward may reach others.
    if has_run and any(one.requires_grad for one in parameters):
        raise RuntimeError(
            f"no parameter of {name} has a gradient at its first update: either the loss reaches "
            "none of them, or they are no longer those of the model; make the optimizer after "
            "wrapping, because fsdp and split layers put others in their place"
        )
    return False


def _is_averaged(model: Any) -> bool:
    """Whether each rank is to update by the same gradients, and comes to every update."""
    if not distributed.is_initialized() or getattr(model, "uneven_inputs", None) is not None:
        return False
    # A hook may leave them apart, as local SGD does, and so may what torch is told to ignore.
    return not any(
        getattr(one, "_comm_hooks", None) or getattr(one, "parameters_to_ignore", None)
        for one in model.modules()
    )


def _compare_averaged(model: Any, parameters: Sequence[Tensor]) -> bool:
    """Compare what a step of its own has averaged; whether that is settled."""
    # The means that the ranks get are the same to the last bit, but for rounding in small ones.
    differs, is_finite = _differing(parameters, model.data_group, tolerance=1e-3, noise=1e-6)
    if not is_finite or not differs:
        return is_finite
    names = {id(one): name for name, one in model.module.named_parameters()}
    name = names.get(id(parameters[differs[0]]), "a parameter")
    raise RuntimeError(
        f"the ranks have different gradients of {name!r} at the first update in "
        f"{type(model).__name__}.train_step, and would train apart. Only the "
        "first backward after a call of self(...), or of a child under separate, averages: not "
        "torch.autograd.grad, and no second backward of calls made before the first. Add up the "
        "losses that share calls, call again before each backward, or take "
        "self.average(gradient)"
    )


def _compare_whole(model: nn.Module, own: set[int], group: ProcessGroup, everywhere: bool) -> bool:
    """Compare, in a tensor group, what each of its ranks holds whole; whether that is settled.

    A layer outside of the plan that sees a part of the sequence, or of the features, gets the
    gradient of that part.
    """
    ranks = distributed.get_process_group_ranks(group)
    named = [
        (name, one)
        for name, one in model.named_parameters()
        if id(one) in own and one.requires_grad and not _is_split(one, ranks)
    ]
    # Far above what kernels that add in any order make of a gradient.
    differs, is_finite = _differing([one for _, one in named], group, tolerance=0.02, noise=1e-3)
    # As many as there are from the first one on, so that the greatest number is the first of all.
    told = torch.tensor([len(named) - differs[0] if differs else 0, int(not is_finite)])
    if everywhere:
        told = told.to(comm_device())
        distributed.all_reduce(told, ReduceOp.MAX)
    left, infinite = told.tolist()
    if not left:
        return not infinite
    raise RuntimeError(
        f"the gradient of {named[-left][0]!r} is not the same on the ranks of a tensor group (here "
        f"{', '.join(map(str, ranks))}), "
        "each of which holds this parameter whole and would train it apart. Either the plan leaves "
        "out a layer that sees a part of the sequence or of the features: give it a style (such "
        'as "sequence" for a norm), or let the layer before give out whole tensors ("replicate"). '
        "Or these ranks do not see the same batches, or draw other random numbers"
    )


def _is_split(parameter: Tensor, ranks: list[int]) -> bool:
    # By their ranks: of equal meshes made one after the other torch keeps the first one's groups.
    over = layout_of(parameter).sharded_over
    return any(distributed.get_process_group_ranks(one) == ranks for one in over)


@torch.no_grad()
def _differing(
    parameters: Sequence[Tensor], group: ProcessGroup | None, *, tolerance: float, noise: float
) -> tuple[list[int], bool]:
    """Which parameters have other gradients on other ranks, and whether all are finite; collective.

    Args:
        tolerance: what may differ, relative to the gradient.
        noise: what is too small to be compared, relative to the largest gradient: it may be
            nothing but rounding.
    """
    # One more, so that there is something to send.
    own = torch.stack([_digest(None), *(_digest(one.grad) for one in parameters)])
    own = own.to(comm_device(group))
    everywhere = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(everywhere, own, group=group)
    digests = torch.stack(everywhere).cpu()
    norms = digests[..., 0].amax(0)
    is_finite = bool(norms.isfinite().all())
    norms = norms.nan_to_num(0.0, 0.0)
    apart = (digests - digests[0]).abs().amax((0, 2))
    differs = (apart > tolerance * norms) & (norms > noise * norms.max())
    return (differs.nonzero().flatten() - 1).tolist(), is_finite


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
