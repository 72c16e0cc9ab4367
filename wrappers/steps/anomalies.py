"""Parameters that a loss does not reach."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

logger = logging.getLogger(__name__)

# Nodes of the graph that run a forward of their own in backward.
_REENTRANT: type = CheckpointFunction._backward_cls


@contextmanager
def watch_gradients(model: nn.Module) -> Iterator[set[int]]:
    """Collect the ids of the parameters whose gradients a backward inside adds to.

    That is how the parameters inside re-entrant activation checkpointing are known, whose part
    of the graph does not exist outside of backward. It takes a hook for each parameter, which is
    called in the backward and removed after it: with ``detect_anomalous_params``'s walk through
    the graph 2 to 5 microseconds of the CPU per parameter and step.
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
        received: what ``watch_gradients`` collected in the backward. Without it, a parameter
            that has a gradient counts as reached where the graph has re-entrant activation
            checkpointing (``torch.utils.checkpoint`` with ``use_reentrant=True``), so do not
            clear the gradients before.
    """
    reached, checkpointed = _leaves(loss)
    missing = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in reached:
            continue
        if received is not None:
            used = id(parameter) in received
        else:
            used = checkpointed and parameter.grad is not None
        if not used:
            missing[name] = parameter
    names = list(missing)
    seen: set[tuple[str, ...]] = model.__dict__.setdefault("_anomalies_seen", set())
    if names and tuple(names) not in seen:
        seen.add(tuple(names))
        for name, parameter in missing.items():
            logger.error(
                "%s with shape %s is not in the computational graph", name, parameter.size()
            )
    return names


def _leaves(loss: Tensor) -> tuple[set[int], bool]:
    """Ids of the leaf tensors under ``loss``, and whether a part of the graph is yet to be built.

    By an explicit stack: graphs can be deep.
    """
    leaves = {id(loss)}
    checkpointed = False
    # The nodes themselves are kept: an id alone could be reused while we walk.
    visited = {loss.grad_fn}
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        checkpointed = checkpointed or isinstance(node, _REENTRANT)
        for following, _ in node.next_functions:
            if following not in visited:
                visited.add(following)
                stack.append(following)
    return leaves, checkpointed
