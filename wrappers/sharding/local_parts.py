"""Parameters that are DTensors while their layer runs, and ordinary ones at all other times."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from .layout import layout_of, local_part

# Of a hook; torch counts from 0.
_HIDE = -1


class _Part:
    """How this rank's part of a tensor becomes the whole as torch knows it."""

    def __init__(self, whole: DTensor) -> None:
        self._mesh = whole.device_mesh
        self._placements = whole.placements
        self._shape = whole.shape
        self._stride = whole.stride()

    def whole(self, part: Tensor) -> DTensor:
        return DTensor.from_local(
            part,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )


class _Parts:
    """Shows a layer its parameters as DTensors while it runs, and everybody else its parts."""

    def __init__(self, parts: dict[str, _Part], owned: list[Tensor]) -> None:
        self._parts = parts
        self._owned = owned
        self._kept: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Parts:
        """What does the same for the copy of the layer."""
        owned: list[Any] = deepcopy(self._owned, memo)
        for one, copied in zip(self._owned, owned, strict=True):
            # A copied parameter has none of the attributes of the first.
            copied.tensor_layout = layout_of(one)
        return _Parts(self._parts, owned)

    def show(self, layer: nn.Module, inputs: Any) -> None:
        """Before the forward."""
        for name, part in self._parts.items():
            store = _store(layer, name)
            if not isinstance(store[name], DTensor):
                self._kept[name] = store[name]
                store[name] = part.whole(store[name])

    def hide(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """After it, also when it failed."""
        for name, kept in self._kept.items():
            _store(layer, name)[name] = kept
        self._kept = {}


class _Waited(torch.autograd.Function):
    """The plain tensor inside of one that is still on its way."""

    @staticmethod
    def forward(ctx: Any, output: AsyncCollectiveTensor) -> Any:
        return output.trigger_wait()  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def wait_for_output(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """Give plain tensors to what follows a split layer; to be called after its forward.

    A block that torch has compiled would send the gradient of another kind of tensor past the
    layer, and its backward would fail.
    """
    if type(output) is AsyncCollectiveTensor:
        return _Waited.apply(output)  # type: ignore[no-untyped-call]
    return output


def _store(layer: nn.Module, name: str) -> MutableMapping[str, Any]:
    return layer._parameters if name in layer._parameters else layer._buffers


def localise_parts(model: nn.Module) -> None:
    """Put this rank's parts in the place of all DTensors."""
    locals_: dict[int, Tensor] = {}
    for layer in list(model.modules()):
        parts: dict[str, _Part] = {}
        for store in (layer._parameters, layer._buffers):
            for name, value in store.items():
                if isinstance(value, DTensor):
                    parts[name] = _Part(value)
                    store[name] = locals_.setdefault(id(value), _local(value))  # type: ignore[assignment]
        if parts:
            held = [_store(layer, name)[name] for name in parts]
            shown = _Parts(parts, [one for one in held if hasattr(one, "tensor_layout")])
            layer.register_forward_pre_hook(shown.show, prepend=True)
            handle = layer.register_forward_hook(shown.hide, always_call=True)
            # torch.compile asks for the number of such a hook, and would compile each of several
            # equal blocks anew, up to its limit, if these numbers differed.
            for hooks in (layer._forward_hooks, layer._forward_hooks_always_called):
                hooks[_HIDE] = hooks.pop(handle.id)  # type: ignore[assignment]


def _local(whole: DTensor) -> Tensor:
    part = local_part(whole.detach())
    if isinstance(whole, nn.Parameter):
        kept = {name: value for name, value in vars(whole).items() if name != "_is_param"}
        part = nn.Parameter(part, requires_grad=whole.requires_grad)
        part.__dict__.update(kept)
    layout = layout_of(whole)
    if layout.sharded_over:
        part.tensor_layout = layout  # type: ignore[attr-defined]
    return part
