"""Checks of training steps: losses, and gradients that are missing or differ between ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointFunction

from ...collectives.process.ranks import get_rank
from ..features import model_features

logger = logging.getLogger(__name__)

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

# The autograd node of re-entrant activation checkpointing, which runs a forward in the backward.
_REENTRANT: type = CheckpointFunction._backward_cls
# The wrappers of this process that average the gradients of whole parameters over the ranks. The
# keys of a dict, because all ranks must go through them in the same order.
averaging_wrappers: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
# The names of losses whose first values `warn_of_total_loss` has compared.
_compared_losses: set[tuple[str, ...]] = set()


def check_unchanged_weights(module: nn.Module, wrapper: str) -> None:
    """Raise ValueError if an embedding changes its weights in the forward (``max_norm``)."""
    for name, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None and isinstance(layer, EMBEDDINGS):
            raise ValueError(
                f"{wrapper} cannot train {name or type(layer).__name__} with max_norm, because "
                "each rank's forward would shorten only the rows in its batch: set max_norm to "
                "None, and shorten the rows of weight.data after each update (on_update of a hook)"
            )


def warn_of_total_loss(losses: Mapping[str, Tensor]) -> None:
    """Warn if the entry "loss" is the sum of the other losses, since all of them are added.

    The values are compared the first time that these names occur; later calls only look them up.
    """
    names = tuple(losses)
    if names in _compared_losses or torch.compiler.is_compiling():
        return
    _compared_losses.add(names)
    terms = [name for name in names if "loss" in name and name != "loss"]
    tensors = [losses[name].detach() for name in ("loss", *terms)]
    # Other kinds of tensors may communicate when they are read.
    if any(type(t) is not Tensor or not t.is_floating_point() or t.is_meta for t in tensors):
        return
    total, *added = [float(tensor) for tensor in tensors]
    # Each addition rounds.
    tolerance = max(1e-6, *(len(terms) * torch.finfo(tensor.dtype).eps for tensor in tensors))
    if total and math.isclose(total, sum(added), rel_tol=tolerance) and get_rank() == 0:
        logger.warning(
            "the entry 'loss' is the sum of %s, and all of them are added, so the training "
            "minimizes twice this sum: leave 'loss' out, or rename the others, such as %s",
            *(", ".join(terms), terms[0].replace("loss", "term")),
        )


def has_custom_step(model: Any) -> bool:
    """Return whether a wrapper runs a custom training step: a subclass's method or the model's."""
    if model_features(model).runs_model_step:
        return True
    owner = next((base for base in type(model).__mro__ if "train_step" in vars(base)), None)
    return owner is None or not owner.__module__.startswith("stepwrap.wrappers.")


class DifferentGradientsError(RuntimeError):
    """Raised at the first update if ranks that average their gradients have different ones.

    Attributes:
        wrapper: the wrapper of the model or, under separate, of the child.
    """

    def __init__(self, text: str, wrapper: nn.Module) -> None:
        super().__init__(text)
        self.wrapper = wrapper


def _frozen_norms(model: nn.Module, ignored: Collection[int]) -> list[str]:
    """Return the paths of norms that are not trained but update their running statistics."""

    def is_frozen(module: nn.Module) -> bool:
        parameters = [*module.parameters()]
        is_trained = any(p.requires_grad and id(p) not in ignored for p in parameters)
        return bool(parameters) and not is_trained

    modules = dict(model.named_modules())
    norms = {path: norm for path, norm in modules.items() if isinstance(norm, _NormBase)}
    # A norm without parameters is frozen together with its parent.
    return [
        path
        for path, norm in norms.items()
        if norm.training
        and norm.running_mean is not None
        and norm.momentum != 0.0
        and is_frozen(norm if norm.affine else modules[path.rpartition(".")[0]])
    ]


def log_frozen_norms(model: nn.Module, not_yet: Iterable[Tensor] = ()) -> None:
    """Log on the first rank which frozen norms still update their running statistics.

    Args:
        not_yet: parameters that require a gradient but are trained later; with them, only norms
            that this freezes are logged.
    """
    ignored = {*map(id, not_yet)}
    paths = _frozen_norms(model, ignored)
    if ignored:
        never_trained = _frozen_norms(model, ())
        paths = [path for path in paths if path not in never_trained]
    if paths and get_rank() == 0:
        logger.warning(
            "%d frozen norms, %s first, still update their running statistics. To keep these, set "
            "freeze: {path.of.module: {eval: true}}, or call wrapper.keep_in_eval([module])",
            len(paths),
            paths[0],
        )


@contextmanager
def watch_gradients(model: nn.Module) -> Iterator[set[int]]:
    """Yield a set that collects the ids of the parameters that get gradients in this context.

    The graph that exists before the backward is not enough to find them: re-entrant activation
    checkpointing builds parts of it during the backward.
    """
    received: set[int] = set()
    handles = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda gradient: received.add(id(gradient))
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
    """Return and log the names of the trainable parameters that ``loss`` does not depend on.

    Call it after the backward. Each distinct set of names is logged once per model.

    Args:
        received: the ids that ``watch_gradients`` collected in the backward. By default only the
            graph is searched. Re-entrant activation checkpointing (``use_reentrant=True``) hides
            parameters from it. If the model uses this, every parameter with a gradient counts as
            used, so call this function before the gradients are cleared.
    """
    reached, checkpointed = _leaves(loss)
    missing = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) in reached:
            continue
        used = checkpointed and parameter.grad is not None
        if not (used if received is None else id(parameter) in received):
            missing[name] = parameter
    reported: set[tuple[str, ...]] = model.__dict__.setdefault("_anomalies_seen", set())
    if tuple(missing) not in reported:
        reported.add(tuple(missing))
        for name, param in missing.items():
            logger.error("%s with shape %s is not in the computational graph", name, param.size())
    return list(missing)


def _leaves(loss: Tensor) -> tuple[set[int], bool]:
    """Return the ids of the leaves of ``loss``, and whether checkpointing hides some of them."""
    leaves, checkpointed = {id(loss)}, False
    # The set holds the nodes and not their ids, because a freed node's id can be reused.
    visited: set[Any] = {None}
    stack: list[Any] = [loss.grad_fn] if loss.grad_fn else []
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        checkpointed = checkpointed or isinstance(node, _REENTRANT)
        following = {successor for successor, _ in node.next_functions} - visited
        visited |= following
        stack += following
    return leaves, checkpointed
