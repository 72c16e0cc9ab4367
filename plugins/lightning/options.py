"""What a strategy is given: the wrapper, its options and those of Lightning's own strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...registry import MODEL_WRAPPERS, nearest
from ...wrappers import wrap_model

_OURS = wrap_model.__module__.rpartition(".")[0]
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
        TypeError: no wrapper, or neither it nor Lightning's strategy has such an option.
        ValueError: an option has a value that cannot be used.
    """
    chosen = _find(wrapper)
    theirs = [
        name for name in inspect.signature(strategy.__mro__[1]).parameters if name not in _NOT_OURS
    ]
    mine = _options_of(chosen)
    options = {name: value for name, value in given.items() if name not in theirs}
    title = getattr(chosen, "__name__", repr(chosen))
    for name in options:
        if name not in mine:
            hint = _hint(name, mine + theirs)
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
    return Choice(chosen, options, own, "mesh" in mine)


def has_own_step(wrapper: Any) -> bool:
    """Whether a wrapper's ``train_step`` is its author's, not that of one of ours."""
    kinds = getattr(wrapper, "__mro__", ())
    owner = next((one for one in kinds if "train_step" in vars(one)), None)
    return owner is not None and not owner.__module__.startswith(f"{_OURS}.")


def _find(wrapper: Any) -> Callable[..., nn.Module]:
    """The wrapper that is meant."""
    if wrapper is None or isinstance(wrapper, str):
        chosen: Any = MODEL_WRAPPERS.resolve(wrapper or "ddp")
    else:
        chosen = wrapper
    known = chosen in [MODEL_WRAPPERS.get(name) for name in MODEL_WRAPPERS.names()]
    steps = isinstance(chosen, type) and hasattr(chosen, "train_step")
    torchs = isinstance(chosen, type) and issubclass(chosen, DistributedDataParallel)
    if known or steps or torchs:
        return chosen  # type: ignore[no-any-return]
    given = getattr(chosen, "__name__", None) or f"an object of type {type(chosen).__name__}"
    raise TypeError(
        f"wrapper must be a model wrapper, that is a class with a train_step, or the name of one "
        f"({', '.join(sorted(_short_names().values()))}), got {given}"
    )


def _short_names() -> dict[Any, str]:
    """The registered wrappers, each with its shortest name."""
    names = sorted(MODEL_WRAPPERS.names(), key=len, reverse=True)
    return {MODEL_WRAPPERS.get(name): name for name in names}


def _hint(option: str, allowed: list[str]) -> str:
    """What may have been meant by an option that a wrapper does not have."""
    others = [n for one, n in _short_names().items() if option in _options_of(one)]
    if others:
        return f"that is an option of {' and '.join(sorted(others))}"
    close = nearest(option, allowed)
    return f"did you mean {close[0]}?" if close else f"it takes {', '.join(allowed)}"


def aside(device: torch.device) -> AbstractContextManager[Any]:
    """Where a wrapper is made: on a GPU on a stream of its own, which CUDA graphs need.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def _options_of(wrapper: Any) -> list[str]:
    made = getattr(wrapper, "config_signature", None)
    signature: inspect.Signature = inspect.signature(wrapper) if made is None else made()
    return [name for name in signature.parameters if name != "module"]
