"""Options that pass through to torch, checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
