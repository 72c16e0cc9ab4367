"""What a training step is refused for: gradients that are missing, or apart on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import CheckpointFunction

logger = logging.getLogger(__name__)

# Nodes of the graph that run a forward of their own in backward.
_REENTRANT: type = CheckpointFunction._backward_cls
# How many backwards are watched: a step does the same again and again, and each hook costs 1 us.
_BACKWARDS = 64


def has_own_step(model: Any) -> bool:
    """Whether a training step is not the usual one of our wrappers: a subclass's, the model's."""
    if getattr(model, "_model_steps", False):
        return True
    owner = next((one for one in type(model).__mro__ if "train_step" in vars(one)), None)
    return owner is None or not owner.__module__.startswith("stepwrap.wrappers.")


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
