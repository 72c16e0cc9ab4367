"""What a training step is refused for: gradients that are missing, or apart on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from ...collectives import comm_device
from ..sharding.layout import is_dtensor, layout_of, local_part, parameters_of, split_models

logger = logging.getLogger(__name__)

# Nodes of the graph that run a forward of their own in backward.
_REENTRANT: type = CheckpointFunction._backward_cls
# How many backwards are watched: a step does the same again and again, and each hook costs 1 us.
_BACKWARDS = 64


class FirstUpdate:
    """Looks at the gradients that an optimizer is about to take for the first time.

    A step of one's own (by a second backward or ``torch.autograd.grad``) and, in a tensor group, a
    layer left out of the plan leave the ranks' gradients apart, and nothing else fails then.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_reached = False
        self._model: Any = None

    def note(self, model: Any) -> None:
        """Learn which wrapper runs the step, if ``model`` is one with a step of its own."""
        if getattr(model, "averages_ranks", False) and has_own_step(model):
            self._model = model

    def check(self, has_run: bool) -> bool:
        """Return whether all is well, so that nothing needs to be looked at again.

        Every rank that shares gradients must call this; RuntimeError where something is wrong.

        Args:
            has_run: there has been a backward.
        """
        parameters = list(parameters_of(self._optimizer))
        if not self._is_reached:
            name = type(self._optimizer).__name__
            if not (_is_reached(parameters, name, has_run) and _tensor_ranks_agree(parameters)):
                return False
            self._is_reached = True
        if self._model is None or not _is_averaged(self._model) or any(map(is_dtensor, parameters)):
            return True
        differs, is_finite = _differing(parameters, self._model.data_group, 1e-3, 1e-6)
        for index in differs.nonzero()[:1]:
            names = {id(one): name for name, one in self._model.module.named_parameters()}
            name = names.get(id(parameters[int(index)]), "a parameter")
            raise RuntimeError(
                f"the ranks have different gradients of {name!r} at the first update in "
                f"{type(self._model).__name__}.train_step, and would train apart. Only the first "
                "backward after a call of self(...), or of a child under separate, averages: not "
                "torch.autograd.grad, and no second backward of calls made before the first. Add "
                "up the losses that share calls, call again before each backward, or take "
                "self.average(gradient)"
            )
        # Infinities hide what differs.
        return is_finite


def has_own_step(model: Any) -> bool:
    """Whether a training step is not the usual one of our wrappers: a subclass's, the model's."""
    if getattr(model, "_model_steps", False):
        return True
    owner = next((one for one in type(model).__mro__ if "train_step" in vars(one)), None)
    return owner is None or not owner.__module__.startswith("stepwrap.wrappers.")


def _is_reached(parameters: Sequence[Tensor], name: str, has_run: bool) -> bool:
    """Whether there is a gradient; RuntimeError where there should be one."""
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


def _tensor_ranks_agree(parameters: Iterable[Tensor]) -> bool:
    """Whether all gradients of tensor groups are finite; RuntimeError where the ranks' differ."""
    own, all_finite = {id(one) for one in parameters}, True
    for model, (group, everywhere) in list(split_models.items()):
        named = {name: one for name, one in model.named_parameters() if id(one) in own}
        if not named:
            continue
        whole = {k: v for k, v in named.items() if v.requires_grad and not _is_split(v, group)}
        differs, is_finite = _differing(whole.values(), group, 0.02, 1e-3)
        wrong = differs.nonzero()
        # As many as there are from the first one on: the greatest number is the first of all.
        found = torch.tensor([len(differs) - int(wrong[0]) if len(wrong) else 0, not is_finite])
        if everywhere:
            found = found.to(comm_device())
            distributed.all_reduce(found, ReduceOp.MAX)
        left, infinite = found.tolist()
        all_finite = all_finite and not infinite
        if not left:
            continue
        name = list(whole)[-left]
        ranks = ", ".join(map(str, distributed.get_process_group_ranks(group)))
        raise RuntimeError(
            f"the gradient of {name!r} is not the same on the ranks of a tensor group (here "
            f"{ranks}), each of which holds this parameter whole and would train it apart. Either "
            "the plan leaves out a layer that sees a part of the sequence or of the features: give "
            'it a style (such as "sequence" for a norm), or let the layer before give out whole '
            'tensors ("replicate"). Or these ranks do not see the same batches, or draw other '
            "random numbers"
        )
    return all_finite


def _is_split(parameter: Tensor, group: ProcessGroup) -> bool:
    # By their ranks: of equal meshes made one after the other torch keeps the first one's groups.
    ranks = distributed.get_process_group_ranks(group)
    over = layout_of(parameter).sharded_over
    return any(distributed.get_process_group_ranks(one) == ranks for one in over)


@torch.no_grad()
def _differing(
    parameters: Iterable[Tensor], group: ProcessGroup | None, tolerance: float, noise: float
) -> tuple[Tensor, bool]:
    """Return whose gradients differ between the ranks, and whether all are finite; collective.

    Args:
        tolerance: what may differ, relative to the gradient: kernels add in any order.
        noise: what may be nothing but rounding, relative to the largest gradient.
    """
    # One more, so that there is something to send.
    own = torch.stack([torch.zeros(4, dtype=torch.float64), *(_digest(p.grad) for p in parameters)])
    own = own.to(comm_device(group))
    everywhere = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(everywhere, own, group=group)
    digests = torch.stack(everywhere).cpu()
    norms = digests[..., 0].amax(0)
    is_finite = bool(norms.isfinite().all())
    norms = norms.nan_to_num(0.0, 0.0)
    apart = (digests - digests[0]).abs().amax((0, 2))
    return ((apart > tolerance * norms) & (norms > noise * norms.max()))[1:], is_finite


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


class AveragingWatch:
    """Raises where a backward of ``DistributedDataParallel`` leaves the ranks' gradients apart.

    torch averages in the first backward after a forward of the wrapper, and in no other.
    """

    def __init__(self, wrapper: Any) -> None:
        self._kind = type(wrapper).__name__
        self._left = _BACKWARDS
        self._is_expected = False
        self._backward = -1
        self._handles = [
            one.register_post_accumulate_grad_hook(self._check)
            for one in wrapper.module.parameters()
            if one.requires_grad
        ]

    def note_forward(self) -> None:
        """The wrapper has been called with gradients: the next backward averages."""
        self._is_expected = True
        if not self._left:
            while self._handles:
                self._handles.pop().remove()

    def _check(self, parameter: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if current == self._backward or not self._left:
            return
        if not self._is_expected:
            raise RuntimeError(
                f"a backward in {self._kind}.train_step leaves the gradients of the ranks apart: "
                "it does not follow a call of self(...). Only the first backward after one "
                "averages; run the forward through self(...), not self.module(...) or its "
                "children, and add up losses that share a forward. A model whose children are "
                "stepped apart, as a GAN's, needs SeparateDistributedDataParallel"
            )
        self._backward, self._is_expected = current, False
        self._left -= 1


class ThawWatch:
    """Raises where a parameter that torch found frozen, and so never averages, was thawed since."""

    def __init__(self, kind: str, module: nn.Module, ignored: Iterable[str], group: Any) -> None:
        self._kind = kind
        named = module.named_parameters() if distributed.get_world_size(group) > 1 else ()
        self._frozen = {k: p for k, p in named if not p.requires_grad and k not in set(ignored)}

    def check(self) -> None:
        """Look at all of them, before a forward."""
        for name, one in self._frozen.items():
            if one.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name!r} was frozen when {self._kind} wrapped the model and requires a "
                    "gradient now, which would not be averaged over the ranks. Wrap the model "
                    "while all that will ever train requires gradients and freeze it after that "
                    "(with find_unused_parameters=True), or use fsdp"
                )


@contextmanager
def watch_gradients(model: nn.Module) -> Iterator[set[int]]:
    """Collect the ids of the parameters whose gradients a backward inside adds to.

    Re-entrant activation checkpointing builds its part of the graph only then.
    """
    received: set[int] = set()
    handles = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda one: received.add(id(one))
        )
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield received
    finally:
        for handle in handles:
            handle.remove()


def detect_anomalous_params(
    loss: Tensor, model: nn.Module, *, received: Collection[int] | None = None
) -> list[str]:
    """Names of the trainable parameters that the backward of ``loss`` does not reach.

    To be called after backward. They are logged once for each distinct set of names, per model.

    Args:
        received: what ``watch_gradients`` collected in the backward. Without it, do not clear the
            gradients before: one counts as reached by them where the graph has re-entrant
            activation checkpointing (``use_reentrant=True``).
    """
    reached, checkpointed = _leaves(loss)
    missing = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in reached:
            continue
        used = checkpointed and parameter.grad is not None
        if not (used if received is None else id(parameter) in received):
            missing[name] = parameter
    seen: set[tuple[str, ...]] = model.__dict__.setdefault("_anomalies_seen", set())
    if tuple(missing) not in seen:
        seen.add(tuple(missing))
        for name, one in missing.items():
            logger.error("%s with shape %s is not in the computational graph", name, one.size())
    return list(missing)


def _leaves(loss: Tensor) -> tuple[set[int], bool]:
    """Ids of the leaves under ``loss``, and whether a part of the graph is yet to be built."""
    leaves, checkpointed = {id(loss)}, False
    # The nodes themselves are kept: an id alone could be reused while we walk.
    visited, stack = {None, loss.grad_fn}, [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        checkpointed = checkpointed or isinstance(node, _REENTRANT)
        following = {one for one, _ in node.next_functions} - visited
        visited |= following
        stack += following
    return leaves, checkpointed
