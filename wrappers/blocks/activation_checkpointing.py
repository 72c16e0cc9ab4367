"""Blocks that forget what they computed, and compute it again for the backward."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ..batchnorm.sync_batchnorm import SynchronizedBatchNorm
from ..torch_functions import check_options, uncompiled
from .blocks import BlockSpec, find_blocks

CheckpointingSpec: TypeAlias = BlockSpec | Mapping[str, Any]

# One subclass for each class, so that two blocks alike stay of one class.
_made: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def checkpoint_activations(model: nn.Module, spec: CheckpointingSpec) -> nn.Module:
    """Have blocks keep only their inputs and run again in the backward; changes them in place.

    Losses and gradients stay the same, with one more forward of the blocks as the price. Each
    block gets a subclass of its class, so that names, attributes, ``isinstance``, copies and
    pickles are what they were. Running statistics are moved once per step, as without.

    Args:
        spec: as for ``find_blocks``; or a mapping with such ``blocks`` and
            ``preserve_rng_state``: whether the second forward draws the same random numbers
            (default: True; without dropout False saves a little time).

    Raises:
        ValueError: something matches no module, or a block has a forward beside its class's.
        TypeError: there is no such option.
    """
    _, preserve = read_checkpointing(spec)
    for block in find_checkpointed(model, spec).values():
        if not isinstance(block, _Checkpointed):
            block.__class__ = _checkpointed(type(block), preserve)
    return model


def find_checkpointed(model: nn.Module, spec: CheckpointingSpec) -> dict[str, nn.Module]:
    """The blocks that are meant, by path; arguments and errors as ``checkpoint_activations``."""
    found = find_blocks(model, read_checkpointing(spec)[0])
    for path, block in found.items():
        if "forward" in vars(block):
            raise ValueError(
                f"{path!r} has a forward of its own beside that of {type(block).__name__}, "
                "which activation checkpointing cannot stand around"
            )
    return found


def read_checkpointing(spec: Any) -> tuple[Any, bool]:
    """Return which blocks are meant, and whether random numbers are drawn again alike.

    Raises:
        TypeError: there is no such option.
    """
    options = dict(spec) if isinstance(spec, Mapping) else {"blocks": spec}
    allowed = ["blocks", "preserve_rng_state", "classes", "min_params"]
    check_options("activation_checkpointing", options, allowed)
    preserve = options.pop("preserve_rng_state", True)
    if not isinstance(preserve, bool):
        raise TypeError(f"preserve_rng_state must be true or false, got {preserve!r}")
    blocks = options.pop("blocks", None)
    if blocks is not None and options:
        raise TypeError(f"activation_checkpointing has blocks or {', '.join(options)}, not both")
    if blocks is None and not options:
        raise TypeError("activation_checkpointing needs blocks")
    return (options or blocks), preserve


class _Checkpointed(nn.Module):
    """What the classes of checkpointed blocks have in common."""

    _block_class: type[nn.Module]
    _preserve_rng_state: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, (_, *arguments), *state = reduced
        made = (self._block_class, self._preserve_rng_state, *arguments)
        return (_new, made, *state)


def _checkpointed(kind: type[nn.Module], preserve: bool) -> type[nn.Module]:
    """The subclass of ``kind`` whose forward is run again in the backward."""
    if (kind, preserve) in _made:
        return _made[kind, preserve]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        # The arguments' names are the block's own and may be those of torch's options.
        call = functools.partial(run, **kwargs) if kwargs else run
        norms = _moving_norms(self)
        if norms:
            return _without_moving_twice(norms, call, args, preserve)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_block_class": kind,
        "_preserve_rng_state": preserve,
        "forward": forward,
    }
    bases = (_Checkpointed, kind)
    made = types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(namespace))
    return _made.setdefault((kind, preserve), made)


def _new(kind: type[nn.Module], preserve: bool, *arguments: Any) -> nn.Module:
    made = _checkpointed(kind, preserve)
    return made.__new__(made, *arguments)


def _moving_norms(block: nn.Module) -> list[_NormBase]:
    """The layers in ``block`` whose running statistics its forward moves."""
    norms = [one for one in block.modules() if isinstance(one, _NormBase)]
    return [one for one in norms if one.training and one.track_running_stats]


@uncompiled("a checkpointed block with running statistics runs outside of graphs")
def _without_moving_twice(
    norms: Sequence[_NormBase], call: Callable[..., Any], args: Sequence[Any], preserve: bool
) -> Any:
    for one in norms:
        if isinstance(one, SynchronizedBatchNorm) and one._place is not None:
            raise RuntimeError(
                "a block with synchronised BatchNorm cannot be checkpointed under dp, whose "
                "copies do not meet again in the backward; choose smaller blocks, or ddp"
            )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _still(norms)

    return checkpoint(
        call, *args, use_reentrant=False, preserve_rng_state=preserve, context_fn=contexts
    )


@contextmanager
def _still(norms: Iterable[_NormBase]) -> Iterator[None]:
    """Leave running statistics where they are; the same tensors are saved for the backward."""
    before = [(one, one.momentum, one._buffers.get("num_batches_tracked")) for one in norms]
    try:
        for one, _, _ in before:
            one.momentum = 0.0
            one._buffers["num_batches_tracked"] = None
        yield
    finally:
        for one, momentum, count in before:
            one.momentum = momentum
            one._buffers["num_batches_tracked"] = count
