"""Options that pass through to torch, checked by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..registry import nearest


def option_names(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that ``function`` takes by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in kinds and one.name != "self"]


def check_options(owner: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise TypeError for the first name in ``given`` that is not in ``allowed``."""
    for name in given:
        if name not in allowed:
            close = nearest(name, allowed)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(allowed)}"
            raise TypeError(f"{owner} has no argument {name!r}; {hint}")


def refuse_double_backward(output: Any, why: str) -> None:
    """Let a backward with ``create_graph=True`` through the tensors in ``output`` raise."""
    # What is compiled refuses by itself.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return

    def check(gradient: Tensor) -> None:
        # Backward runs with gradients enabled only where its own graph is wanted.
        if torch.is_grad_enabled():
            raise RuntimeError(f"a gradient of a gradient (create_graph=True) {why}")

    for one in [output] if isinstance(output, Tensor) else tree_leaves(output):
        if isinstance(one, Tensor) and one.requires_grad:
            one.register_hook(check)  # type: ignore[no-untyped-call]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[_Function], _Function]:
    """Let ``torch.compile`` leave a function as it is, with all that it calls, for this reason."""

    def decorate(function: _Function) -> _Function:
        disabled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                # Not at import: it loads the compiler, for a second.
                disabled = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
