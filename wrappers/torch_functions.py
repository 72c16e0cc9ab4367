"""Helpers around functions of torch: options by name, double backward, compilation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..primitives.suggestions import did_you_mean


def option_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that ``function`` accepts by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in kinds and one.name != "self"]


def check_options(owner: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise TypeError for the first name in ``given`` that is not in ``allowed``."""
    for name in given:
        if name not in allowed:
            hint = did_you_mean(name, allowed, limit=1) or f"; it takes {', '.join(allowed)}"
            raise TypeError(f"{owner} has no argument {name!r}{hint}")


def refuse_double_backward(output: Any, why: str) -> None:
    """Make a later backward with ``create_graph=True`` raise if it reaches tensors in ``output``.

    Args:
        output: tensors in lists, tuples and dicts.
        why: the end of the message "a gradient of a gradient (create_graph=True) ...".
    """
    # In compiled code torch itself raises an error.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return

    def check(gradient: Tensor) -> None:
        # Gradients are enabled in a backward only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(f"a gradient of a gradient (create_graph=True) {why}")

    for one in tree_leaves(output):
        if isinstance(one, Tensor) and one.requires_grad:
            one.register_hook(check)  # type: ignore[no-untyped-call]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[_Function], _Function]:
    """Exclude a function, and everything it calls, from ``torch.compile``."""

    def decorate(function: _Function) -> _Function:
        disabled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                # Not called at import, because it loads the compiler, which takes a second.
                disabled = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
