"""Checks that ranks can train copies of a model and average all of its gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...collectives import all_gather_object
from ..steps.step_checks import check_unchanged_weights

# Number of backwards to check. Later steps do the same, and each hook costs 1 us per step.
_BACKWARDS = 64
_STRIDE = Tensor.stride


def check_same_model(
    module: nn.Module, wrapper: str, group: distributed.ProcessGroup | None
) -> None:
    """Check that the ranks can train copies of a model; every rank of the group must call this.

    Raises:
        ValueError: the parameters or their order differ between ranks, or the forward of a layer
            changes its weights.
    """
    if distributed.get_world_size(group) == 1:
        return
    parameters = [
        f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' (frozen)'}"
        for name, param in module.named_parameters()
    ]
    text = "\n".join(parameters).encode()
    digests = all_gather_object(hashlib.sha256(text).digest(), group)
    if len(set(digests)) > 1:
        by_rank: list[list[str]] = all_gather_object(parameters, group)
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        pairs = zip_longest(by_rank[0], by_rank[other], fillvalue="no parameter")
        position, (a, b) = next((n, pair) for n, pair in enumerate(pairs) if len({*pair}) > 1)
        raise ValueError(
            f"{wrapper} needs the same model on all ranks, but parameter {position} is {a} on rank "
            f"0 and {b} on rank {other}: create the layers in the same order on all ranks, for "
            "example not in the order of a set"
        )
    check_unchanged_weights(module, wrapper)


class AveragingWatch:
    """Raise if a backward of a ``DistributedDataParallel`` does not average the gradients.

    torch averages only in the first backward after a forward of the wrapper.
    """

    def __init__(self, wrapper: Any) -> None:
        self._kind = type(wrapper).__name__
        self._left = _BACKWARDS
        self._is_expected = False
        self._backward = -1
        self._handles = [
            param.register_post_accumulate_grad_hook(self._check)
            for param in wrapper.module.parameters()
            if param.requires_grad
        ]

    def note_forward(self) -> None:
        """Record a call of the wrapper with gradients enabled: the next backward averages."""
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
                f"a backward in {self._kind}.train_step must follow a call of self(...), and this "
                "one does not: its gradients would differ between ranks. Only the first backward "
                "after a call averages; run the forward through self(...), not self.module(...) "
                "or its children, and add up losses that share a forward. A model whose children "
                "are updated separately, such as a GAN, needs SeparateDistributedDataParallel"
            )
        self._backward, self._is_expected = current, False
        self._left -= 1


class ThawWatch:
    """Raise if a parameter that was frozen when torch's DDP wrapped the model is trained now.

    DDP does not average the gradients of such a parameter.
    """

    def __init__(self, kind: str, module: nn.Module, ignored: Iterable[str], group: Any) -> None:
        self._kind = kind
        named = module.named_parameters() if distributed.get_world_size(group) > 1 else ()
        self._frozen = {k: p for k, p in named if not p.requires_grad and k not in set(ignored)}

    def check(self) -> None:
        """Check all parameters, before a forward."""
        for name, param in self._frozen.items():
            if param.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name!r} was frozen when {self._kind} wrapped the model and requires a "
                    "gradient now, which would not be averaged over the ranks. Every parameter "
                    "that is ever trained must require a gradient when the model is wrapped: "
                    "freeze it after that (with find_unused_parameters=True), or use fsdp"
                )


class LayoutWatch:
    """Raise if a parameter has another memory layout than when torch's DDP wrapped the model.

    DDP fills its buckets in the layout of that time and reads them in the current one, so it would
    return the averaged gradients in another order.
    """

    def __init__(
        self, kind: str, module: nn.Module, ignored: Iterable[str], prefix: str = ""
    ) -> None:
        self._kind = kind
        skipped = set(ignored)
        # A vector has only one layout.
        named = {
            prefix + name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.ndim > 1 and name not in skipped
        }
        self._names, self._parameters = [*named], [*named.values()]
        self.accept()

    def accept(self) -> None:
        """Take the current layouts as those at the time of wrapping."""
        self._strides = [*map(_STRIDE, self._parameters)]

    def check(self) -> None:
        """Compare the strides of all parameters, before a forward."""
        if [*map(_STRIDE, self._parameters)] == self._strides:
            return
        for name, parameter, before in zip(
            self._names, self._parameters, self._strides, strict=True
        ):
            sizes, now = parameter.shape, parameter.stride()
            # The stride of a dimension of size 1 has no effect.
            if any(size > 1 and now[dim] != before[dim] for dim, size in enumerate(sizes)):
                raise RuntimeError(
                    f"the memory layout of {name!r} has changed since {self._kind} wrapped the "
                    f"model: its strides were {before} and are {now}. torch would average its "
                    "gradient in the old layout and return it in the new one, with its elements "
                    "exchanged. Set the layout before wrapping, for example "
                    "model.to(memory_format=torch.channels_last), or restore it"
                )
        self.accept()
