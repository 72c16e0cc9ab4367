"""What a strategy is given: the wrapper, its options and those of Lightning's own strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ..registry import MODEL_WRAPPERS, nearest

# Hooks and averaging are the wrapper's: there they work on the CPU as well.
_NOT_OURS = {
    "self",
    "kwargs",
    "ddp_comm_hook",
    "ddp_comm_state",
    "ddp_comm_wrapper",
    "model_averaging_period",
}


class Choice(NamedTuple):
    """A wrapper with its options, and the options of Lightning's own strategy."""

    wrapper: Callable[..., nn.Module]
    options: dict[str, Any]
    own: dict[str, Any]
    shards: bool


def read_options(
    strategy: type, wrapper: str | Callable[..., nn.Module] | None, given: Mapping[str, Any]
) -> Choice:
    """Find the wrapper and check all options.

    Args:
        strategy: the strategy, whose base class is Lightning's.

    Raises:
        KeyError: no wrapper is registered under that name.
        TypeError: neither the wrapper nor Lightning's strategy has such an option.
        ValueError: an option has a value that cannot be used.
    """
    found = MODEL_WRAPPERS.resolve(wrapper) if isinstance(wrapper, str) else wrapper
    chosen: Callable[..., nn.Module] = MODEL_WRAPPERS.resolve("ddp") if found is None else found
    theirs = [
        name for name in inspect.signature(strategy.__mro__[1]).parameters if name not in _NOT_OURS
    ]
    signature = _signature(chosen)
    mine = [name for name in signature.parameters if name != "module"]
    options = {name: value for name, value in given.items() if name not in theirs}
    title = getattr(chosen, "__name__", repr(chosen))
    for name in options:
        if name not in mine:
            close = nearest(name, [*mine, *theirs])
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(mine + theirs)}"
            raise TypeError(
                f"{strategy.__name__} with wrapper {title} has no option {name!r}; {hint}"
            )
    if options.get("uneven_inputs"):
        raise ValueError(
            "uneven_inputs is for loops of ours: Lightning's samplers give all ranks equally many "
            "batches; leave it out"
        )
    check = getattr(chosen, "check_options", None)
    if check is not None:
        check(options)
    own = {name: value for name, value in given.items() if name in theirs}
    return Choice(chosen, options, own, "mesh" in signature.parameters)


def aside(device: torch.device) -> AbstractContextManager[Any]:
    """Where a wrapper is made: on a GPU on a stream of its own, which CUDA graphs need.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _signature(wrapper: Any) -> inspect.Signature:
    made = getattr(wrapper, "config_signature", None)
    signature: inspect.Signature = inspect.signature(wrapper) if made is None else made()
    return signature
