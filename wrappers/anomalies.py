"""Parameters that a loss does not reach."""

from __future__ import annotations

import logging

from torch import Tensor, nn

logger = logging.getLogger(__name__)


def detect_anomalous_params(loss: Tensor, model: nn.Module) -> list[str]:
    """Names of the trainable parameters that are not in the graph of ``loss``.

    May run after backward. They are logged once for each distinct set of names, per model.
    Parameters that are used inside re-entrant activation checkpointing only are reported
    although they get gradients: their part of the graph does not exist outside backward.
    """
    reached = _leaves(loss)
    missing = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in reached
    }
    names = list(missing)
    seen: set[tuple[str, ...]] = model.__dict__.setdefault("_anomalies_seen", set())
    if names and tuple(names) not in seen:
        seen.add(tuple(names))
        for name, parameter in missing.items():
            logger.error(
                "%s with shape %s is not in the computational graph", name, parameter.size()
            )
    return names


def _leaves(loss: Tensor) -> set[int]:
    """Ids of the leaf tensors under ``loss``, by an explicit stack: graphs can be deep."""
    leaves = {id(loss)}
    # The nodes themselves are kept: an id alone could be reused while we walk.
    visited = {loss.grad_fn}
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following not in visited:
                visited.add(following)
                stack.append(following)
    return leaves
