"""Gradients of gradients, refused where torch would lose a part of them without a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def refuse_double_backward(output: Any, why: str) -> None:
    """Let a backward with ``create_graph=True`` through ``output`` raise RuntimeError.

    Args:
        output: what a forward returned, any nesting of tensors.
        why: what is in the way, and what works instead.
    """
    # What is compiled refuses by itself.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return

    def check(gradient: Tensor) -> None:
        # Backward runs with gradients enabled only where its own graph is wanted.
        if torch.is_grad_enabled():
            raise RuntimeError(f"a gradient of a gradient (create_graph=True) {why}")

    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    for one in leaves:
        if isinstance(one, Tensor) and one.requires_grad:
            one.register_hook(check)  # type: ignore[no-untyped-call]
