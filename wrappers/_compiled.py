"""Functions that torch.compile must leave alone."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(reason: str) -> Callable[[_Function], _Function]:
    """Let ``torch.compile`` around a function leave it as it is, with all that it calls.

    Args:
        reason: what ``fullgraph=True``, where that is an error, is told.
    """

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
